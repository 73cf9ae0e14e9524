"""The notebook runs from top to bottom, and shows what a reader's own execution will show."""

from __future__ import annotations

import copy
import re

import nbformat
import pytest
from conftest import ROOT
from execute_notebook import NOTEBOOK, differences, execute
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

SECTIONS = 9


@pytest.fixture(scope="module")
def committed() -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_a_reader_who_runs_all_cells_sees_the_outputs_that_are_committed(committed, tmp_path):
    fresh = execute(committed, tmp_path)
    found = differences(committed, fresh)
    assert not found, "\n".join([*found, "if that is right: python tests/execute_notebook.py"])


def test_a_figure_that_is_no_longer_true_is_noticed(committed):
    def after(cell: str, old: str, new: str) -> list[str]:
        """What is found when `old` in the output of a cell had become `new`."""
        changed = copy.deepcopy(committed)
        (output,) = next(c for c in changed.cells if c.id == cell).outputs
        assert old in output.text
        output.text = output.text.replace(old, new)
        return differences(committed, changed)

    assert not differences(committed, committed)
    assert len(after("targets", "39 in 72", "40 in 72")) == 1
    assert len(after("influence", "changed token: 0\n", "changed token: 0.001\n")) == 1
    (loss,) = re.findall(r"by hand (\d\.\d{4})", next(
        c for c in committed.cells if c.id == "loss").outputs[0].text)  # fmt: skip
    assert not after("loss", f"hand {loss}", f"hand {float(loss) + 1e-4:.4f}")  # rounding
    assert len(after("loss", f"hand {loss}", f"hand {float(loss) + 2e-4:.4f}")) == 1
    without = copy.deepcopy(committed)
    next(c for c in without.cells if c.id == "metrics-picture").outputs = []
    assert len(differences(committed, without)) == 1


def test_no_warning_distracts_the_reader(committed):
    shown = [output for cell in committed.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert not [output for output in shown if "Warning" in output.get("text", "")]


def test_a_launch_that_fails_shows_its_error_and_stops_the_notebook(committed, tmp_path):
    cells = [c for c in committed.cells if "setup" in c.metadata.get("tags", [])]
    launch = 'launch(1, "llm_ddp_parallel_training.py --seq-len 1")'
    cells += [new_code_cell(launch), new_code_cell("Path('went-on').touch()")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    with pytest.raises(CellExecutionError, match="exit status 2") as stopped:
        execute(notebook, tmp_path)
    assert "error: argument --seq-len" in str(stopped.value)
    assert not (tmp_path / "went-on").exists()


def test_every_section_ends_with_a_question_whose_answer_is_folded_away(committed):
    texts = [cell.source for cell in committed.cells if cell.cell_type == "markdown"]
    opened = [i for i, text in enumerate(texts) if text.startswith("## ")]
    assert [texts[i][3] for i in opened] == [str(number + 1) for number in range(SECTIONS)]
    for end in [*opened[1:], len(texts)]:
        assert "**Question.**" in texts[end - 1], texts[end - 1]
        assert texts[end - 1].rstrip().endswith("</details>")
        assert texts[end - 1].count("**Question.**") == 1


def test_no_link_in_the_notebook_is_broken(committed):
    texts = [cell.source for cell in committed.cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(texts))
    assert len(links) > 5
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_notebook_stays_small_enough_to_read_on_a_git_host(committed):
    assert NOTEBOOK.stat().st_size < 1.5e6
