"""A process that does a case's work once and says how much memory it took: one line of JSON."""

import json
import sys
from dataclasses import asdict

from bench import measure
from bench.cases import CASES


def main(question: str) -> None:
    """`question`: the case and the conditions, as JSON."""
    asked = json.loads(question)
    case = CASES[asked.pop("case")]
    conditions = measure.Conditions(**asked)
    assert case.work is not None
    with measure.threads(conditions.threads):
        work = case.work(conditions)  # data are loaded here
        found = measure.watch(work)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
