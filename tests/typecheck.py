"""The runtime type checker of the tests: beartype, with an int taken where a float is wanted."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
