"""The folder of a checkpoint: what a save removes, replaces and leaves alone; values that are loaded into a
copy of higher precision.
"""

import pytest
import torch

from pycomm.parallel.checkpoint import files, hub, loading, sharded_loading
from pycomm.parallel.checkpoint.dicts import set_values
from pycomm.parallel.checkpoint.state import FORMAT

WORD = "0123456789abcdef"


def checkpoint(path, text):
    path.mkdir(parents=True)
    (path / files.METADATA).write_text(text)
    return path


def read(path):
    return (path / files.METADATA).read_text()


@pytest.mark.parametrize("name", ["run", "a+b", "run.old", "(1)"])
def test_only_what_saves_have_left_is_removed(name, tmp_path):
    path, others = tmp_path / name, ["other", f"{name}2", f"{name}.older", f"my{name}.old", f"{name}.saving-"]
    others += [f"{name}.saving-{WORD}0", f"{name}.saving-{WORD[:-1]}", f"{name}.saving-{WORD.upper()}"]
    others += [f"{name}.saving-{WORD}.copy", "aab.old"]
    for other in others:
        checkpoint(tmp_path / other, other)
    for left in (".old", f".saving-{WORD}", f".saving-{WORD[::-1]}"):
        checkpoint(tmp_path / f"{name}{left}", "left")
    files.make_room(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)
    checkpoint(path, "mine")
    files.make_room(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, name]) and read(path) == "mine"


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    files.make_room(tmp_path / "no" / "parent")
    (tmp_path / "empty").mkdir()
    files.make_room(tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ValueError, match=f"{name} exists and is no checkpoint"):
            files.make_room(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_new_one_takes_the_place_of_the_old_one(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(files, "_exchange_names", lambda one, other: False)
    path = tmp_path / "run"
    for number in range(3):
        scratch = checkpoint(files.scratch_of(path, WORD), str(number))
        assert scratch.parent == tmp_path and scratch != path
        files.put_in_place(path, scratch)
        assert read(path) == str(number) and [p.name for p in tmp_path.iterdir()] == ["run"]
    with pytest.raises(
        FileNotFoundError, match=rf"{scratch.name} was removed: another save to .*run has begun"
    ):
        files.put_in_place(path, scratch)
    assert read(path) == "2"


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*run \(no file .metadata in it\)$"):
        files.catalog_of(tmp_path / "run")
    checkpoint(tmp_path / "run.old", "x")
    with pytest.raises(FileNotFoundError, match=r"interrupted, the checkpoint before it is .*run.old"):
        files.catalog_of(tmp_path / "run")
    checkpoint(tmp_path / "run", "no pickle")
    with pytest.raises(ValueError, match=r"run/.metadata cannot be read: "):
        files.catalog_of(tmp_path / "run")


def test_lists_in_errors_end_after_some():
    """Keys of a checkpoint, names of a state, keys of files of the hub."""
    for some, most, key in (
        (loading._some, 5, "model/n{}"),
        (sharded_loading._some, 5, "n{}"),
        (hub._some, 3, "n{}"),
    ):
        for count in range(1, 9):
            shown = ", ".join(f"'n{number}'" for number in range(min(count, most)))
            more = f" and {count - most} more" if count > most else ""
            assert some([key.format(number) for number in range(count)]) == shown + more
    assert sharded_loading._some([]) == "nothing"


def test_a_format_of_another_version_is_refused():
    for number in (FORMAT + 1, FORMAT - 1):
        with pytest.raises(ValueError, match=rf"load: run has format {number}, this is {FORMAT}: .*wrote it"):
            loading._check_model(None, "run", {}, {"format": number}, ())


def test_a_copy_stays_where_it_rounds_to_what_is_loaded():
    """In its bits, also for a value that is not finite; where another value comes it becomes that one."""
    master = torch.tensor([0.1, -0.0, 1e-40, float("inf"), 3e38, 1 + 2**-20, -7.3, 0.0])
    for narrow in (torch.bfloat16, torch.float16):
        kept = master.clone()
        set_values(kept, master.to(narrow), narrow)
        assert torch.equal(kept, master) and torch.equal(kept.signbit(), master.signbit())
        other = master.to(narrow)
        other[0], other[5] = 2.5, 1.5
        set_values(kept, other, narrow)
        assert kept[0] == 2.5 and kept[5] == 1.5 and torch.equal(kept[6:], master[6:])
        set_values(kept, master.double() * 0.3, narrow)  # of another dtype: it is the copy itself
        assert torch.equal(kept, (master.double() * 0.3).float())
        whole = master.to(narrow)
        set_values(whole, master * 0.3, narrow)
        assert torch.equal(whole, (master * 0.3).to(narrow))
