"""What reads feature files and tables."""

from fuzz.campaign import Target

TARGETS: list[Target] = []
