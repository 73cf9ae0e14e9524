"""`python -m labs.planner`: see the docstring of the package, and --help."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started by its path, from another folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from labs.planner.flags import flag_parser
from labs.planner.models import PlanError
from labs.planner.plan import make_plan
from labs.planner.report import draw_memory, report
from labs.shared.report import show


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the plan; ends with status 2 and one line for a question that makes no sense."""
    try:
        args = flag_parser().parse_args(argv)
        plan = make_plan(args)
        if args.picture:
            draw_memory(plan, args.picture)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.json and math.isinf(plan["machine"]["memory"]):
        plan["machine"]["memory"] = None  # JSON knows no infinity
    show(json.dumps(plan, indent=2) if args.json else report(plan))


if __name__ == "__main__":
    main()
