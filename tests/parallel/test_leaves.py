"""ground/leaves.py against torch's own order of leaves."""

from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from pycomm.parallel.ground.leaves import leaves
from pycomm.parallel.pipeline.absent import Absent

Pair = namedtuple("Pair", "first second")
X, Y = torch.ones(2), torch.nn.Parameter(torch.ones(3))
ABSENT = torch.ones(1).as_subclass(Absent)
CASES = [
    X,
    None,
    (),
    [],
    {},
    "text",
    (X, [Y, {"b": X, "a": (None, 1, 2.5, True)}], {}),
    ((ABSENT, torch.float32, torch.device("cpu")), {"mask": ABSENT, "size": torch.Size((2, 3))}),
    [Pair(X, [Y]), OrderedDict(z=X, a=Y), deque([X, (Y,)]), defaultdict(list, {"k": [X]})],
    torch.return_types.max((X, Y)),
    [object, slice(1, 2), {1, 2}, lambda: X],
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_order_of_torch(number):
    found, expected = leaves(CASES[number]), tree_leaves(CASES[number])
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in expected]
