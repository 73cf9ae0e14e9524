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
from labs.break_it.runner import RANKS, Finding, reproduce
from labs.shared.flags import flag, flag_parser, refuse_launcher, require_writable
from labs.shared.plot import new_figure, require_matplotlib, save_figure
from labs.shared.report import paragraph, show, table
from llm_ddp_parallel_training import RunError, UserError, one_clear_ending, write_json

DRAWN = {  # what a bug's number is, and how it is written
    "no-sync-on-last": ("largest difference between\nthe ranks' weights", "{:.1e}"),
    "mean-of-means": ("gradient: relative distance\nfrom that of one process", "{:.1e}"),
    "no-set-epoch": ("share of samples at the same\nplace in both epochs", "{:.0%}"),
    "validation-padding": ("validation loss: distance\nfrom that of one process", "{:.1e}"),
    "clip-before-unscale": ("norm of the gradient used;\nthe limit is 0.1", "{:.2g}"),
    "rank-0-collective": ("ranks that wait for ever", "{:.0f}"),
}


@dataclasses.dataclass
class Options:
    list: bool = flag(False, "the bugs, one a line; so without any flag")
    bug: str | None = flag(None, "make this one, in some seconds", choices=BUGS, metavar="NAME")
    all: bool = flag(False, "make all of them, in about a minute, and end with a table")
    json: Path | None = flag(None, "also write the findings there, replacing an old file")
    picture: Path | None = flag(None, "also draw six of them there, with --all")


def main(argv: Sequence[str] | None = None) -> None:
    """From the command line to the conclusion."""
    with one_clear_ending():
        about = "The classic bugs of distributed training, each made on two ranks."
        parser = flag_parser(Options, prog="python -m labs.break_it", description=about)
        options = Options(**vars(parser.parse_args(argv)))
        if options.list + options.all + bool(options.bug) > 1:
            raise UserError("--list, --bug and --all exclude each other")
        if options.picture and not options.all:
            raise UserError("--picture draws six bugs: give --all with it")
        refuse_launcher("break_it")
        if not (options.all or options.bug):
            show(table([[name, title(kind)] for name, kind in BUGS.items()], align="<<"))
            show("\nMake one with --bug NAME, or all of them with --all.")
            return
        require_writable("--json", options.json)
        require_writable("--picture", options.picture)
        if options.picture:
            require_matplotlib()
        make(list(BUGS) if options.all else [options.bug], options)


def make(names: list[str], options: Options) -> None:
    """Makes these bugs, tells about each, and concludes. Raises `RunError` if one was not seen."""
    what, time = ("all bugs", "about a minute") if len(names) > 1 else (names[0], "some seconds")
    show(f"{what}, each wrong and right, on {RANKS} ranks of this CPU: {time}")
    findings: dict[str, dict[str, Finding]] = {}
    for name in names:
        if not issubclass(BUGS[name], OnPaper):
            findings[name] = reproduce(name)
        tell(name, findings.get(name, {}))
    if options.picture:
        draw(findings, options.picture)
    if options.json:
        told = {
            name: {version: dataclasses.asdict(f) for version, f in both.items()}
            for name, both in findings.items()
        }
        write_json(options.json, told)
    if len(names) > 1:
        show("\nAll bugs\n========\n")
        show(table([row for name in names for row in rows(name, findings.get(name))], align="<<<"))
    missing = [name for name, both in findings.items() if not shown(name, both)]
    if missing:
        raise RunError(f"not shown: {', '.join(missing)}")
    show("\n" + conclusion(findings))


def title(thing: type[Bug] | Callable) -> str:
    """The first line of a docstring."""
    return inspect.getdoc(thing).splitlines()[0]


def source(function: Callable) -> list[str]:
    """The lines of a function, after those of what it uses of this lab: all can be copied."""
    lines: list[str] = []
    for name in function.__code__.co_names:
        used = function.__globals__.get(name)
        if getattr(used, "__module__", "").startswith(__package__):
            lines += [*(source(used) if inspect.isfunction(used) else source_of(used)), ""]
    return lines + source_of(function)


def source_of(thing: type | Callable) -> list[str]:
    return textwrap.dedent(inspect.getsource(thing)).splitlines()


def tell(name: str, findings: dict[str, Finding]) -> None:
    """Prints all there is to say about a bug."""
    kind = BUGS[name]
    about = " ".join(inspect.getdoc(kind).split("\n\n", 1)[1].split())
    show(f"\n{name}\n{'=' * len(name)}\n{title(kind)}\n\n{paragraph(about)}\n")
    for line in difflib.ndiff(source(kind.wrong), source(kind.right)):
        if not line.startswith("?"):
            show(f"    {line}".rstrip())
    show("\nsymptom")
    for version, finding in findings.items():
        show(paragraph(f"{version:7}" + finding.symptom, "    "))
    if not findings:
        show(paragraph(f"not made, it needs two GPUs: {kind.seen}", "    "))
    show("\ndetector")
    if kind.debug:
        show(f"    TORCH_DISTRIBUTED_DEBUG={kind.debug}")
    show(textwrap.indent("\n".join(source(kind.detector)), "    ") + "\n")
    for version, finding in findings.items():
        show(paragraph(f"{version:7}{finding.detected or 'silent'}", "    "))


def rows(name: str, findings: dict[str, Finding] | None) -> list[list[str]]:
    """A bug's rows in the table of all."""
    kind, symptom = BUGS[name], f"not made: {getattr(BUGS[name], 'seen', '')}"
    if findings:
        symptom = f"{findings['wrong'].symptom}; right: {findings['right'].symptom}"
    return [
        [name, "wrong", title(kind.wrong)],
        ["", "symptom", symptom],
        ["", "detector", title(kind.detector)],
        ["", "right", title(kind.right)],
    ]


def draw(findings: dict[str, dict[str, Finding]], path: Path) -> None:
    """Six symptoms, a bar for each version, as a PNG."""
    figure = new_figure(12, 5.5)
    for axes, (name, (unit, form)) in zip(figure.subplots(2, 3).flat, DRAWN.items()):
        values = [findings[name][version].number for version in ("wrong", "right")]
        axes.bar(("wrong", "right"), values, color=("tab:red", "tab:green"), width=0.5)
        for x, value in enumerate(values):
            axes.text(x, value, form.format(value) if value else "0", ha="center", va="bottom")
        axes.set(title=name, xlabel=unit, ylim=(0, 1.15 * max(values)), yticks=[])
    save_figure(figure, path)


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
