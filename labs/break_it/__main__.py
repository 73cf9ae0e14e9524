"""The lab's flags, and what it says about each bug."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:  # started by its path: the project is two folders up
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from labs.break_it import BUGS, detectors
from labs.break_it.bug import Bug, OnPaper, Stop
from labs.break_it.picture import draw
from labs.break_it.runner import RANKS, Finding, reproduce
from labs.shared.flags import flag, flag_parser, refuse_launcher, require_writable, say
from labs.shared.plot import require_matplotlib
from labs.shared.report import paragraph, table
from llm_ddp_parallel_training import (
    RunError,
    UserError,
    one_clear_ending,
    write_json,
)


@dataclasses.dataclass
class Options:
    list: bool = flag(False, "the bugs, one a line; so without any flag")
    bug: str | None = flag(None, "make this one, in some seconds", choices=BUGS, metavar="NAME")
    all: bool = flag(False, "make all of them, in about a minute, and end with a table")
    json: Path | None = flag(None, "also write the findings there, replacing an old file")
    picture: Path | None = flag(None, "also draw six of them there, with --all")


def main(argv: Sequence[str] | None = None) -> None:
    with one_clear_ending():
        description = "The classic bugs of distributed training, each made on two ranks."
        parser = flag_parser(Options, prog="python -m labs.break_it", description=description)
        options = Options(**vars(parser.parse_args(argv)))
        if options.list + options.all + bool(options.bug) > 1:
            raise UserError("--list, --bug and --all exclude each other")
        if options.picture and not options.all:
            raise UserError("--picture draws six bugs: give --all with it")
        refuse_launcher("break_it")
        if not (options.all or options.bug):
            say(table([[name, title(kind)] for name, kind in BUGS.items()], align="<<"))
            say("\nMake one with --bug NAME, or all of them with --all.")
            return
        require_writable("--json", options.json)
        require_writable("--picture", options.picture)
        if options.picture:
            require_matplotlib()
        make(list(BUGS) if options.all else [options.bug], options)


def make(names: list[str], options: Options) -> None:
    """Makes these bugs, tells about each, and concludes. Raises `RunError` if one was not seen."""
    what, time = ("all bugs", "about a minute") if len(names) > 1 else (names[0], "some seconds")
    say(f"{what}, each wrong and right, on {RANKS} ranks of this CPU: {time}")
    findings = {}
    for name in names:
        if not issubclass(BUGS[name], OnPaper):
            findings[name] = reproduce(name)
        tell(name, findings.get(name))
    if options.picture:
        draw(findings, options.picture)
    if options.json:
        write_json(options.json, {
            name: {version: dataclasses.asdict(f) for version, f in both.items()}
            for name, both in findings.items()
        })  # fmt: skip
    if len(names) > 1:
        say("\nAll bugs\n========\n")
        say(table([row for name in names for row in rows(name, findings.get(name))], align="<<<"))
    missing = [name for name, both in findings.items() if not shown(name, both)]
    if missing:
        raise RunError(f"not shown: {', '.join(missing)}")
    say("\n" + conclusion(findings))


def title(kind: type[Bug]) -> str:
    return inspect.getdoc(kind).splitlines()[0]


def in_short(function: Callable) -> str:
    """The first line of a function's docstring, as it stands in the table."""
    text = inspect.getdoc(function).splitlines()[0].rstrip(".")
    return text[0].lower() + text[1:] if text.split()[0][1:].islower() else text


def source(function: Callable) -> list[str]:
    """The lines of a function, without decorators."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :]


def helpers(function: Callable) -> list[str]:
    """The source of what a function uses of this lab, so that it can be copied, too."""
    lines: list[str] = []
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if getattr(used, "__module__", "").startswith(__package__):
            inner = [] if inspect.isclass(used) else helpers(used)
            lines += [*inner, *inspect.getsource(used).splitlines(), ""]
    return lines


def tell(name: str, findings: dict[str, Finding] | None) -> None:
    """Prints all there is to say about a bug."""
    kind = BUGS[name]
    about = " ".join(inspect.getdoc(kind).split("\n\n", 1)[1].split())
    say(f"\n{name}\n{'=' * len(name)}\n{title(kind)}\n\n{paragraph(about)}\n")
    before = [f"  {line}" for line in helpers(kind.wrong)]
    for line in [*before, *difflib.ndiff(source(kind.wrong), source(kind.right))]:
        if not line.startswith("?"):
            say(f"    {line}".rstrip())
    say("\nsymptom")
    for version, text in symptoms(kind, findings).items():
        say(paragraph(f"{version:7}" + text, "    "))
    say("\ndetector")
    for key, value in kind.environment.items():
        say(f"    {key}={value}")
    code = [*helpers(kind.detector), *source(kind.detector)]
    say(textwrap.indent("\n".join(code), "    ") + "\n")
    for version, finding in (findings or {}).items():
        say(paragraph(f"{version:7}{finding.detected or 'silent'}", "    "))


def symptoms(kind: type[Bug], findings: dict[str, Finding] | None) -> dict[str, str]:
    if findings is None:
        return {"not made, it needs two GPUs:": " " + kind.seen}
    return {version: finding.symptom for version, finding in findings.items()}


def rows(name: str, findings: dict[str, Finding] | None) -> list[list[str]]:
    """A bug's rows in the table of all. Of the right version's symptom only what is different."""
    kind = BUGS[name]
    wrong, *right = symptoms(kind, findings).values()
    if right and len(wrong.split()) == len(right[0].split()):
        right = [" ".join(r for w, r in zip(wrong.split(), right[0].split()) if w != r)]
    return [
        [name, "wrong", in_short(kind.wrong)],
        ["", "symptom", wrong.strip() + "".join(f"; right: {text}" for text in right)],
        ["", "detector", in_short(kind.detector)],
        ["", "right", in_short(kind.right)],
    ]


def shown(name: str, findings: dict[str, Finding]) -> bool:
    """Whether the detector spoke to the wrong version only, and what should stop did."""
    stopped = not issubclass(BUGS[name], Stop) or findings["wrong"].number == RANKS
    return stopped and bool(findings["wrong"].detected) and findings["right"].detected is None


def conclusion(findings: dict[str, dict[str, Finding]]) -> str:
    """What to take home, when every bug was shown."""
    if not findings:
        return "It was not made; the code above is all there is to see."
    if len(findings) < 2:
        return "The detector found the wrong version and was silent on the right one."
    silent = [name for name in findings if not issubclass(BUGS[name], Stop)]
    shared = [n for n in silent if inspect.getmodule(BUGS[n].detector) is detectors]
    return paragraph(
        f"{len(findings)} of {len(findings)} bugs made and detected. {len(silent)} of them raise "
        f"no error, and the training goes on: {len(shared)} of these are found by comparing the "
        "ranks' weights or gradients, or one gradient with that of a single process."
    )


if __name__ == "__main__":
    main()
