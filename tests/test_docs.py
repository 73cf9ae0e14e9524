"""README, wiki and launch files: what they show works, and what they say is so."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import (
    ROOT,
    clean_environment,
    losses,
    main_here,
    metrics,
    run_command,
    settings_of,
    train_here,
)
from quick import free_port
from torch.distributed.run import get_args_parser

import llm_ddp_parallel_training as reference

SCRIPT = "llm_ddp_parallel_training.py"
WIKI = sorted((ROOT / "wiki").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WIKI]
LAUNCH_FILES = sorted((ROOT / "wiki" / "launch").iterdir())
LAB_FILES = sorted((ROOT / "labs").rglob("*.py"))
LABS = sorted(path.parent.name for path in (ROOT / "labs").glob("*/__main__.py"))
BENCHMARKS = sorted((ROOT / "tests" / "benchmarks").glob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def every_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=name_of)(test)


# -- Reading Markdown ----------------------------------------------------------------------


@dataclasses.dataclass
class Block:
    """A fenced block of code, and the invisible comment right before it."""

    page: Path
    line: int
    marker: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    def commands(self) -> list[str]:
        """Its command lines, those that end in a backslash or && joined with the next."""
        lines = re.sub(r"(\\|(?<=&&))\n\s*", " ", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


FENCED = re.compile(r"(?:<!-- ([^>\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1] or "", match[2], match[3])
        for match in FENCED.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", page.read_text("utf-8"))


def table(page: Path, what: str) -> list[list[str]]:
    """The cells of the rows of the table marked `<!-- check: what -->`, without its head."""
    text = page.read_text("utf-8")
    (rows,) = re.findall(rf"<!-- check: {what} -->\n((?:\|.*\n)+)", text)
    cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in rows.splitlines()[2:]]
    return [[re.sub(r"^\| ?| ?\|$", "", cell) for cell in row] for row in cells]


def page_named(name: str) -> Path:
    return ROOT / "wiki" / f"{name}.md"


def code(cell: str) -> str:
    """What stands between the backticks of a cell."""
    (inner,) = re.findall(r"`([^`]+)`", cell)
    return inner


# -- Commands ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of what a user's commands touch, beside a folder `bin` with this Python."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / SCRIPT, folder)
    for part in ("labs", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return with_python(folder, f'exec "{sys.executable}" "$@"')


def with_python(folder: Path, does: str) -> Path:
    """Puts a command `python` into `folder`/bin."""
    (folder / "bin").mkdir()
    stand_in(folder / "bin" / "python", does)
    return folder


def stand_in(path: Path, does: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{does}\n", encoding="utf-8")
    path.chmod(0o755)


def environment(folder: Path, **extra: str) -> dict[str, str]:
    return clean_environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **extra)


def shell(text: str, folder: Path, **options):
    return run_command(["bash", "-euo", "pipefail", "-c", text], cwd=folder, **options)


def runnable(page: Path) -> list[tuple[Block, str]]:
    """The page's blocks to be run, each with the lines that it must print."""
    found: list[tuple[Block, str]] = []
    for block in blocks(page):
        if re.fullmatch(r"run(: (--.*|fails with \d+))?", block.marker):
            found.append((block, output_after(block)))
    return found


def output_after(block: Block) -> str:
    """The text of the block marked as the output of this one, if there is one."""
    following = [other for other in blocks(block.page) if other.line > block.line][:1]
    return "".join(other.text for other in following if other.marker == "output")


def check_output(shown: str, printed: str) -> None:
    """Each line shown was printed, from its beginning on; `…` stands for anything."""
    for line in shown.splitlines():
        pattern = re.escape(line).replace("…", ".*")
        assert re.search(f"^{pattern}", printed, re.MULTILINE), f"{line}\n--\n{printed}"


@pytest.mark.parametrize(
    ("block", "output"),
    [pytest.param(*case, id=str(case[0])) for page in PAGES for case in runnable(page)],
)
def test_a_command_block_does_what_its_page_shows(block, output, copy):
    extra = re.match("run: (--.*)", block.marker)
    status = re.match(r"run: fails with (\d+)", block.marker)
    commands = [
        f"{line} {extra[1]}" if extra and programs(line) else line for line in block.commands()
    ]
    finished = shell("\n".join(commands), copy, env=environment(copy))
    assert finished.status == (int(status[1]) if status else 0), finished.out + finished.err
    check_output(output, finished.out + finished.err)


def test_a_small_qwen_learns_the_readmes_chats_as_its_page_shows(copy, monkeypatch):
    """In this process, because importing transformers twice more takes long."""
    from qwen_assets import save_folder

    (block,) = (b for b in blocks(page_named("Qwen-LoRA")) if b.marker == "run: small qwen")
    (chats,) = (b.text for b in blocks(ROOT / "README.md") if b.language == "json")
    make, train, ask = block.commands()
    assert "qwen_assets.save_folder('small-qwen')" in make
    monkeypatch.chdir(copy)
    save_folder(Path("small-qwen"))
    Path("chats.jsonl").write_text(chats, "utf-8")
    trained, asked = (main_here(*shlex.split(line)[2:]) for line in (train, ask))
    assert trained.status == 0, trained.out + trained.err
    check_output(output_after(block), trained.out + asked.out)


def test_every_page_with_a_first_command_has_one_that_is_run():
    run_here = {name_of(block.page) for page in PAGES for block, _ in runnable(page)}
    assert {
        "wiki/Home.md",
        "wiki/Troubleshooting.md",
        "wiki/Understanding-Gradients.md",
    } <= run_here


def test_two_launch_agents_train_together_by_the_documented_command(copy):
    (block,) = (
        b for b in blocks(page_named("GPU-and-Distributed-Backends")) if "agents" in b.marker
    )
    (line,) = block.commands()
    line = line.replace("localhost:29500", f"localhost:{free_port()}")
    options = {"cwd": copy, "env": environment(copy), "start_new_session": True, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    agents = [subprocess.Popen(["bash", "-c", line], **options, **pipes) for _ in range(2)]
    try:
        endings = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    assert [agent.returncode for agent in agents] == [0, 0], endings
    (said,) = (out for out, _ in endings if out.strip())  # one of them holds rank 0
    assert "× ranks 2 =" in said
    assert "(equal on all 2 ranks)" in said
    folder = copy / "runs" / "two-agents"
    train_here(copy / "alone", "--max-steps", 20, "--batch-size", 16)
    assert losses(folder) == pytest.approx(losses(copy / "alone"), abs=1e-6)


# -- Links ---------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Git hosts form them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in plain}


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures inside the project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@every_page
def test_no_link_is_broken(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}"


def test_every_page_of_the_wiki_is_in_its_sidebar():
    listed = set(links(page_named("_Sidebar")))
    assert listed == {page.name for page in WIKI} - {"_Sidebar.md"}


def test_the_published_wiki_links_to_pages_by_their_names(tmp_path):
    finished = run_command(["bash", f"{ROOT}/wiki/publish.sh", "."], cwd=tmp_path)
    assert finished.status == 0, finished.err
    for page in WIKI:
        published = tmp_path / page.name
        for target in re.findall(r"\]\(([^)\s#]+)", FENCED.sub("", published.read_text("utf-8"))):
            if target.startswith("../"):
                assert (ROOT / re.sub(r"^\.\./(blob|raw)/main/", "", target)).exists(), target
            elif not re.match(r"[a-z]+:", target):
                place = tmp_path / target
                assert place.is_file() or place.with_suffix(".md").is_file(), target
                assert not target.endswith(".md")


# -- Flags and names -----------------------------------------------------------------------


def options_of(parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


SCRIPTS_FLAGS = options_of(reference.flag_parser())
LAUNCHERS_FLAGS = options_of(get_args_parser())
OTHERS_FLAGS = {"--shm-size", "--signal"}  # of docker and SLURM


@functools.cache
def flags_in(path: Path) -> set[str]:
    """The strings in a file's code that are flags."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return {c for c in constants if isinstance(c, str) and re.fullmatch("--[a-z][a-z0-9-]*", c)}


@functools.cache
def flags_of_lab(program: str) -> set[str]:
    """The flags that a lab's help names, and the script's if it passes them on."""
    module = importlib.import_module(program)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{program}.__main__")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        module.main(["--help"])
    own = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", out.getvalue()))
    return own | (SCRIPTS_FLAGS if "All other flags are those of" in out.getvalue() else set())


def programs(command: str) -> list[tuple[str, list[str]]]:
    """(program, its arguments) of the launcher, the script and the labs in a command line."""
    words, found = command.replace('"', "").replace("'", "").split(), []
    for i, word in enumerate(words):
        after_m = i > 0 and words[i - 1] == "-m"
        if word.endswith((SCRIPT, "slurm.sbatch", "torchrun.sh", "mac.sh", "windows.ps1")):
            found.append((SCRIPT, []))
        elif after_m and (word.startswith("labs.") or word == "torch.distributed.run"):
            found.append((word, []))
        elif found and word in ("&&", "||", ";", "|", "#", "&"):
            found.append(("", []))  # whatever comes next is another program's
        elif found:
            found[-1][1].append(word)
    return [(program, arguments) for program, arguments in found if program]


def known_flags(program: str) -> set[str]:
    if program == SCRIPT:
        return SCRIPTS_FLAGS
    if program == "torch.distributed.run":
        return LAUNCHERS_FLAGS
    return flags_of_lab(program)


def all_commands() -> list[tuple[Path, str]]:
    """Every command line of the pages and the launch files."""
    shown = [(page, c) for page in PAGES for block in blocks(page) for c in block.commands()]
    for page in PAGES:  # a command inside a sentence
        shown += [(page, c) for c in re.findall(r"`(python [^`]+)`", prose(page))]
    for path in LAUNCH_FILES:
        lines = re.sub(r"\\\n\s*", " ", path.read_text("utf-8")).splitlines()
        shown += [(path, re.sub(r"^# ", "", line.strip())) for line in lines]
    return shown


def test_no_command_uses_a_flag_that_its_program_does_not_have():
    checked = 0
    for path, command in all_commands():
        for program, arguments in programs(command):
            for flag in (a.partition("=")[0] for a in arguments if re.match("--[a-z]", a)):
                assert flag in known_flags(program), f"{name_of(path)}: {program} has no {flag}"
                checked += 1
    assert checked > 100


@every_page
def test_no_sentence_names_a_flag_that_does_not_exist(page):
    known = SCRIPTS_FLAGS | LAUNCHERS_FLAGS | OTHERS_FLAGS
    known = known.union(*(flags_of_lab(f"labs.{lab}") for lab in LABS))
    known = known.union(*map(flags_in, BENCHMARKS))
    text = re.sub(r"`[^`\n]*\b(?:ruff|pip|py-spy)\b[^`\n]*`", " ", prose(page))  # not ours
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        assert flag in known, f"{name_of(page)} names {flag}"


def test_the_commands_for_the_script_pass_its_own_checks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("a text of one's own\n", "utf-8")
    checked = 0
    for path, command in all_commands():
        if "..." in command or "…" in command or path in LAUNCH_FILES:
            continue
        for program, arguments in programs(command.replace('"The "', "The")):
            if program == SCRIPT and "wiki/launch/" not in command and "--resume" not in arguments:
                settings_of(*arguments)
                checked += 1
    assert checked > 10


SOURCES = "\n".join(path.read_text("utf-8") for path in [ROOT / SCRIPT, *LAB_FILES, *LAUNCH_FILES])


@pytest.mark.parametrize("page", [p for p in WIKI if p.stem != "Planning"], ids=name_of)
def test_names_of_functions_and_classes_are_those_of_the_code(page):
    for span in re.findall(r"`([^`]+)`", prose(page)):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)(?:\((.*)\))?", span)
        if not match or not (match[2] is not None or re.search(r"_|[a-z][A-Z]", span)):
            continue
        name, arguments = match.groups()
        if hasattr(reference, name.partition(".")[0]):
            target = reference
            for part in name.split("."):
                target = getattr(target, part)
            if arguments and "=" not in arguments:
                matches_signature(target, arguments, span)
        else:
            last = name.rpartition(".")[2] if not (ROOT / name).exists() else ""
            assert re.search(rf"\b{re.escape(last)}\b", SOURCES), f"{name_of(page)}: {span}"


def matches_signature(target, arguments: str, span: str) -> None:
    """The arguments shown are the function's first ones, and none that it needs is missing."""
    parameters = [p for name, p in inspect.signature(target).parameters.items() if name != "self"]
    shown = [argument.strip() for argument in arguments.split(",")]
    assert shown == [p.name for p in parameters[: len(shown)]], span
    assert all(p.default is not p.empty for p in parameters[len(shown) :]), span


# -- Tables --------------------------------------------------------------------------------


def test_the_defaults_that_depend_on_other_flags_are_as_the_page_says():
    page = page_named("Low-Level-Design").read_text("utf-8")
    tiny, qwen = (settings_of("--model", model) for model in ("tiny", "qwen"))
    rates = [f"{s.lr:.0e}".replace("e-0", "e-") for s in (tiny, qwen)]
    assert f"`--lr` is {rates[0]} for tiny and {rates[1]} for qwen" in page
    assert f"`--seq-len` {tiny.seq_len} and {qwen.seq_len}" in page
    assert f"`--max-steps` {tiny.max_steps} without `--epochs`" in page


def test_the_class_diagram_holds_every_class_of_part_1():
    part_1 = (ROOT / SCRIPT).read_text("utf-8").split("# ==== Part ")[1]
    classes = re.findall(r"^class (\w+)", part_1, re.MULTILINE)
    (diagram,) = (b.text for b in blocks(page_named("Low-Level-Design")) if "mermaid" in b.language)
    assert len(classes) > 5
    assert set(classes) <= set(re.findall(r"^    class (\w+) \{$", diagram, re.MULTILINE))


def test_the_exit_statuses_are_those_of_the_errors():
    for row in table(page_named("Low-Level-Design"), "statuses"):
        kind = getattr(reference, code(row[0]))
        if kind is reference.Stopped:
            signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
            assert row[1] == " or ".join(str(kind("", number).status) for number in signals)
        else:
            assert row[1] == str(kind.status)
            assert ("rank concerned" in row[2] or "which writes" in row[2]) != kind.by_all_ranks


def test_the_files_of_a_run_and_the_columns_of_its_log_are_the_documented_ones(tmp_path):
    page = page_named("Low-Level-Design")
    assert {code(row[0]) for row in table(page, "files")} == set(reference.ARTIFACTS)
    train_here(tmp_path / "run", "--max-steps", 1)
    keys = {key for row in metrics(tmp_path / "run") for key in row}
    assert {code(row[0]) for row in table(page, "metrics")} == keys


def test_the_shapes_of_the_tiny_model_are_the_documented_ones():
    page, model, shapes = page_named("Tiny-Transformer"), reference.TinyCausalTransformer(), {}
    for name in ("token_emb", "encoder", "norm", "lm_head"):
        getattr(model, name).register_forward_hook(
            lambda _, inputs, output, name=name: shapes.update({name: output.shape})
        )
    model.encoder.register_forward_pre_hook(
        lambda _, inputs, options: shapes.update(mask=options["mask"].shape), with_kwargs=True
    )
    batch = reference.tiny_collator([(i, "text") for i in range(3)], seq_len=21)
    shapes.update({name: batch[name].shape for name in ("input_ids", "labels")})
    shapes["loss"] = model(batch["input_ids"], batch["labels"]).shape
    letters = {"B": 3, "T": 21}
    for name, shape in table(page, "shapes"):
        sizes = [letters.get(word) or int(word) for word in re.findall(r"\w+", shape)]
        assert list(shapes.pop(code(name))) == sizes, name
    assert not shapes


def test_the_parameters_of_the_tiny_model_are_the_documented_ones():
    page, model = page_named("Tiny-Transformer"), reference.TinyCausalTransformer()
    rows = [[code(name), code(shape), count] for name, shape, count in table(page, "parameters")]
    real = [[n, str(list(p.shape)), f"{p.numel():,}"] for n, p in model.named_parameters()]
    assert rows == real
    total = sum(p.numel() for p in model.parameters())
    assert f"\n{total:,} at the default size" in page.read_text("utf-8")
    (formula,) = re.findall(r"`(2·258·D.*)`", page.read_text("utf-8"))
    formula = formula.replace("·", "*").replace("D²", "D**2")
    for width, layers, window in ((64, 1, 64), (32, 3, 17)):
        model = reference.TinyCausalTransformer(width, layers, 4, 0.0, window)
        count = eval(formula, {"D": width, "L": layers, "T": window})
        assert sum(p.numel() for p in model.parameters()) == count


def test_the_example_batch_is_what_the_collator_makes():
    (example,) = re.findall(
        r"^\| `Hi` .*$", page_named("Tiny-Transformer").read_text("utf-8"), re.M
    )
    _, tokens, labels = (cell.strip() for cell in example.strip("|").split("|"))
    batch = reference.tiny_collator([(0, "Hi")], seq_len=5)
    assert batch["input_ids"][0].tolist() == [int(token) for token in tokens.split()]
    assert batch["labels"][0].tolist() == [int(x.replace("−", "-")) for x in labels.split()]


def test_the_limits_on_the_page_about_qwen_are_those_of_the_code():
    page = page_named("Qwen-LoRA").read_text("utf-8")
    (most,) = re.findall(r"flatten_up_to = (\d+)", inspect.getsource(reference.qwen_collator))
    assert f"up to {int(most):,} real tokens" in page
    assert f"for {reference.FrozenHeadLoss.CHUNK} positions at a time" in page
    default = settings_of("--model", "qwen")
    alpha = f"r {default.lora_r}, alpha {default.lora_alpha}, dropout {default.lora_dropout}"
    assert alpha in " ".join(page.split())


def test_quoted_messages_are_those_of_the_script():
    source = re.sub(r'"\s*\n\s*f?"', "", (ROOT / SCRIPT).read_text("utf-8"))  # joined literals
    for row in table(page_named("Troubleshooting"), "messages"):
        for piece in code(row[0]).split("…"):
            assert piece.strip() in source, row[0]


def test_the_page_on_bugs_lists_those_that_the_lab_makes():
    from labs.break_it import BUGS

    assert [code(row[0]) for row in table(page_named("Common-Bugs"), "bugs")] == list(BUGS)


def test_the_claims_about_gradients_quote_the_output_that_their_page_shows():
    page = " ".join(page_named("Understanding-Gradients").read_text("utf-8").split())
    (shown,) = (output for block, output in runnable(page_named("Understanding-Gradients")))
    one, two, averaged = (f"{float(x):.3f}" for x in re.findall(r"total +(.*) …", shown)[0].split())
    assert f"norm {one} on rank 0, {two} on rank 1; the averaged one has {averaged}." in page
    rows = re.findall(r"^ +\d +(\d+) +(\S+) ", shown, re.MULTILINE)
    tokens, losses = zip(*((int(n), float(loss)) for n, loss in rows))
    loss = sum(n * x for n, x in zip(tokens, losses)) / sum(tokens)
    mean_of_means = sum(losses) / len(losses)
    (said,) = re.findall(r"the mean of the means is (\S+), the loss (\S+)\. ", page)
    assert [float(x) for x in said] == pytest.approx([mean_of_means, loss], abs=1e-6)
    buckets, size = re.findall(r"DDP sent (\d+) buckets: ([\d,]+) bytes", shown)[0]
    parameters = int(size.replace(",", "")) // 4
    assert buckets == "4" and f"together {size} bytes: four for each of the {parameters:,}" in page


@pytest.mark.parametrize(("name", "at_least"), [("Performance", 50), ("Planning", 20)])
def test_figures_of_a_page_stand_where_they_were_measured(name, at_least):
    page = page_named(name).read_text("utf-8")
    measured = (ROOT / "tests" / "benchmarks" / "README.md").read_text("utf-8")
    measured += (ROOT / "README.md").read_text("utf-8")
    tables = re.findall(r"<!-- check: figures -->\n((?:\|.*\n)+)", page)
    figures = [
        f for t in tables for row in t.splitlines()[2:] for f in re.findall(r"\d[\d.,]*", row)
    ]
    assert len(figures) > at_least
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d,]|\.\d)", measured), figure


# -- Launch files --------------------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path) -> Path:
    """A folder in which `python` prints its arguments instead of running."""
    folder = with_python(tmp_path, 'printf "%s\\n" "$@"')
    stand_in(folder / "bin" / "srun", 'exec "$@"')
    stand_in(folder / "bin" / "scontrol", "echo node-a; echo node-b")
    return folder


def launched(text: str, folder: Path, **variables: str) -> tuple:
    """What the launcher and the script would get from a launch file: both parsed."""
    finished = shell(text, folder, env=environment(folder, **variables))
    assert finished.status == 0, finished.err
    words = finished.out.splitlines()
    assert words[:2] == ["-m", "torch.distributed.run"]
    launcher = get_args_parser().parse_args(words[2:])
    assert launcher.training_script == SCRIPT
    return launcher, launcher.training_script_args


def checkpoint_in(run: Path) -> None:
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step-00000100.pt").touch()


def test_the_slurm_file_starts_a_run_and_goes_on_with_it_when_submitted_again(stand_ins):
    text = (ROOT / "wiki" / "launch" / "slurm.sbatch").read_text("utf-8")
    variables = {
        "SLURM_JOB_NAME": "ddp", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    call = f"set -- --model qwen --epochs 3\n{text}"
    launcher, flags = launched(call, stand_ins, **variables)
    assert (launcher.nnodes, launcher.nproc_per_node) == ("2", "8")
    assert (launcher.rdzv_endpoint, launcher.rdzv_id) == ("node-a:29500", "17")
    settings = settings_of(*flags)
    assert (settings.output_dir, settings.model, settings.epochs) == (Path("runs/ddp"), "qwen", 3)
    checkpoint_in(stand_ins / "runs" / "ddp")
    _, flags = launched(call, stand_ins, **variables)
    assert flags[:2] == ["--resume", "runs/ddp"] and "--output-dir" not in flags
    # SIGTERM comes early enough for the launcher to wait for its ranks.
    (notice,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
    (patience,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text, re.MULTILINE)
    assert int(notice) > int(patience)
    directives = [i for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    first_command = text.splitlines().index("set -euo pipefail")
    assert max(directives) < first_command  # SLURM stops reading them there


def test_the_kubernetes_file_is_consistent_with_itself(stand_ins):
    text = (ROOT / "wiki" / "launch" / "kubernetes.yaml").read_text("utf-8")
    service, job = yaml.safe_load_all(text)
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert container["command"] == ["bash", "-euc"]
    launcher, flags = launched(container["args"][0], stand_ins, **variables)
    host = launcher.rdzv_endpoint.partition(":")[0]
    assert host == f"{name}-0.{service['metadata']['name']}"  # the pod that has this name
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert int(launcher.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    limits = container["resources"]["limits"]
    assert int(launcher.nproc_per_node) == limits["nvidia.com/gpu"]
    patience = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["terminationGracePeriodSeconds"] > patience
    assert settings_of(*flags).output_dir == Path("/runs/train")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=name_of)
def test_a_launch_file_names_files_where_they_are(path):
    """Also by a Windows path, in which no other test sees a folder that has moved."""
    text = path.read_text("utf-8").replace("\\", "/")
    named = re.findall(r"[\w./]*launch/[\w.]+\w", text)
    assert named or path.name == "Dockerfile"  # it is named by the file that uses it
    assert all((ROOT / name).is_file() for name in named), named


@pytest.mark.parametrize(
    ("line", "nodes", "ranks"),
    [
        ("wiki/launch/torchrun.sh node-a 2 8 --model qwen", "2", "8"),
        ("wiki/launch/mac.sh 2 --max-steps 20", "1:1", "2"),
    ],
)
def test_a_launch_file_passes_its_flags_on(stand_ins, line, nodes, ranks):
    launcher, flags = launched(f"bash '{ROOT}'/{line}", stand_ins)
    assert (launcher.nnodes, launcher.nproc_per_node) == (nodes, ranks)
    given = line.split("8 " if "node-a" in line else "2 ", 1)[1].split()
    assert flags[-len(given) :] == given
    settings_of(*flags)


def test_one_process_on_a_mac_needs_no_launcher(stand_ins):
    call = f"bash '{ROOT}'/wiki/launch/mac.sh 1 --max-steps 20"
    finished = shell(call, stand_ins, env=environment(stand_ins))
    assert finished.out.splitlines() == [SCRIPT, "--max-steps", "20"]
