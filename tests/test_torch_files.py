"""tests/torch_suite/files.py, which runs PyTorch's own test files from a checkout (`make test-torch-files`):
what it refuses, and how it judges, on a checkout of one tiny file made here.
"""

import textwrap

import pytest
from tiers import tier
from torch_suite import files

TESTS = textwrap.dedent("""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu


    class Two(MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def init(self):
            store = dist.FileStore(self.file_name, self.world_size)
            dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
            dist.barrier()  # whoever ends while Gloo still connects its peer makes the peer fail

        def test_sum(self):
            self.init()
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            self.assertEqual(tensor, torch.full((3,), 2.0))

        def test_of_gloo_alone(self):
            self.init()
            self.assertEqual(dist.get_backend(), "gloo")

        def test_made_by_class(self):
            options = dist.ProcessGroupGloo._Options()
            options._timeout = 20.0
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            store = dist.FileStore(self.file_name, self.world_size)
            group = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
            group.barrier().wait()
            with self.assertRaisesRegex(RuntimeError, "invalid root rank"):
                group.broadcast(torch.ones(1), root=2)

        @skip_if_lt_x_gpu(2)
        def test_gpus(self):
            self.init()
            self.assertEqual(torch.ones(1, device=self.rank).device.type, "cuda")
""")
NAME = "test_c10d_gloo.py::Two."


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pytorch")
    (folder / "version.txt").write_text("2.98.0a0\n")
    (folder / "test" / "distributed").mkdir(parents=True)
    (folder / "test" / "distributed" / "test_c10d_gloo.py").write_text(TESTS)
    return folder


def test_refuses_folders(checkout, tmp_path, capsys):
    assert files.open_checkout(checkout, "2.98.1+cpu").version == "2.98.0a0"
    assert files.open_checkout(checkout, "2.13.0", any_version=True).version == "2.98.0a0"
    with pytest.raises(ValueError, match="is PyTorch 2.98.0a0, but torch 2.13.0 is installed.*tag v2.13.0"):
        files.open_checkout(checkout, "2.13.0")
    with pytest.raises(ValueError, match="is no checkout of PyTorch: it has no folder test/distributed"):
        files.open_checkout(tmp_path, "2.13.0")
    with pytest.raises(ValueError, match="no folder is given"):
        files.open_checkout("", "2.13.0")
    assert files.main([str(checkout)]) == 2
    assert "PyTorch 2.98.0a0" in capsys.readouterr().err


@tier(slow=1)
@pytest.mark.timeout(900)
def test_compares_and_judges(checkout, tmp_path, monkeypatch, capsys):
    """One test passes on both, one on Gloo alone, one is refused in other words, one is skipped."""
    known = tmp_path / "differences.txt"
    known.write_text(f"# comment\n\n{NAME}test_made_by_class  words: another root\n")
    monkeypatch.setattr(files, "DIFFERENCES", known)
    monkeypatch.setattr(files, "read_differences", lambda read=files.read_differences: read(known))
    assert files.main([str(checkout), "--any-version", "--limit", "250", "gloo::Two"]) == 1
    out = capsys.readouterr().out
    assert f"DIFFERS {NAME}test_of_gloo_alone" in out and "'pycomm' != 'gloo'" in out, out
    assert "1 differences to explain, 0 explained ones that pass, 0 files not run" in out, out
    assert "| test_c10d_gloo.py | 4 | 3 | 1 | 1 | 1 |" in out, out


@tier(slow=1)
@pytest.mark.timeout(300)
def test_gpus(checkout, monkeypatch, capsys):
    """A test that asks for GPUs runs, but what makes no sense on the CPU fails, on Gloo first of all."""
    monkeypatch.setattr(files, "read_differences", dict)
    assert files.main([str(checkout), "--gpus", "--any-version", "gloo::gpus", "gloo::test_sum"]) == 0
    assert "| test_c10d_gloo.py | 2 | 1 | 1 | 0 | 0 |" in capsys.readouterr().out


def test_judges_the_list(tmp_path):
    passed, failed = ({"outcome": outcome, "reason": "why"} for outcome in ("passed", "failed"))
    known = {"f::a": "a reason", "f::b": "words: others", "f::c": "words: others"}

    def judged(name, pycomm, other_words=None, gloo=passed):
        return files.judge([files.Compared(name, gloo, pycomm, other_words or {})], known)

    assert judged("f::a", failed) == ([], [])
    assert judged("f::a", passed) == ([], ["f::a"])
    assert judged("f::b", failed, passed) == ([], [])
    assert judged("f::c", failed, failed) == ([("f::c", "with any words accepted: why")], [])
    assert judged("f::new", failed) == ([("f::new", "why")], [])
    assert judged("f::new", failed, gloo=failed) == ([], [])

    one = tmp_path / "one.txt"
    one.write_text("f::a\n")
    with pytest.raises(ValueError, match="one.txt: f::a has no reason"):
        files.read_differences(one)
    assert files.read_differences()  # the list of the repository can be read
