"""What FLARE's wire cannot take apart is refused at the site, at once and by name."""

import enum
from collections import Counter, OrderedDict
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import fobs as registry

from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.wire import UpdateMessage, pack_update, read_error
from harmofl.flare.wire_types import unknown_type


class Own:
    """FLARE sends any object with a __dict__, and takes none apart that it does not know."""

    def __init__(self) -> None:
        self.name = "Jane_Doe"


class Color(enum.Enum):
    RED = 1


def arrives(value: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether FLARE serializes a value here and takes it apart in a process that has seen no such value before."""
    common_decomposers.register()
    flare_decomposers.register()
    fobs.dumps(Shareable({"first": np.zeros(1)}))  # registers what every process has
    known = registry._decomposers
    try:
        monkeypatch.setattr(registry, "_decomposers", dict(known))
        packed = fobs.dumps(Shareable({"value": value}))
        monkeypatch.setattr(registry, "_decomposers", dict(known))
        fobs.loads(packed)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


KNOWN = [1, 1.5, True, None, "text", b"bytes", [1, [2]], (1, "a"), {1}, {"a": {"b": 1}}, {1: 2}, OrderedDict(a=1)]
KNOWN += [np.zeros(2), np.zeros(2, np.float16), np.zeros(2, bool), np.float64(1), np.float32(1), np.int64(1)]
KNOWN += [DataKind.METRICS, DXO(DataKind.WEIGHTS, data={"w": np.zeros(1)}), 2**64 - 1, -(2**63)]
UNKNOWN = [Own(), Color.RED, torch.zeros(1), Path("/data/Jane_Doe.nii.gz"), Decimal(1), Counter("ab"), 1j, range(2)]
UNKNOWN += [np.bool_(1), np.float16(1), np.int8(1), np.array([None]), np.ma.zeros(2), 2**64, frozenset([1])]
UNKNOWN += ["\ud800", {"a": [1, {"b": Own()}]}, DXO(DataKind.WEIGHTS, data={"w": Decimal(1)})]


@pytest.mark.parametrize("value", KNOWN, ids=lambda value: type(value).__name__)
def test_what_flare_takes_apart_is_let_through(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrives(value, monkeypatch)
    assert unknown_type(Shareable({"value": value})) == ""


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_what_flare_cannot_take_apart_is_named(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not arrives(value, monkeypatch)
    told = unknown_type(Shareable({"value": value}))
    assert told.startswith("value") and "Jane_Doe" not in told


def test_the_place_is_named() -> None:
    inner = DXO(DataKind.WEIGHT_DIFF, data={"conv.weight": torch.zeros(2)})
    answer = DXO(DataKind.COLLECTION, data={"weights": inner}).to_shareable()
    assert unknown_type(answer) == "DXO.data.weights.data.conv.weight is of type torch.Tensor"
    assert unknown_type(Shareable({"a": {"b": [0, 1j]}})) == "a.b[1] is of type builtins.complex"
    assert unknown_type(Shareable({"Jane Doe, 1970": 1j})) == "a part of it is of type builtins.complex"


def context(answer: Shareable) -> Any:
    held = FLContextManager(None, "HK", "job", {}, {}).new_context()
    held.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    held.set_prop(FLContextKey.TASK_RESULT, answer, private=True, sticky=False)
    return held


def test_an_answer_that_a_filter_spoiled_becomes_an_error_with_site_and_key() -> None:
    answer = pack_update(UpdateMessage({"w": np.zeros(2, np.float32)}, None, {"steps": 1}))
    sent = answer
    HarmoFLExecutor().handle_event(EventType.AFTER_TASK_RESULT_FILTER, context(answer))
    assert answer.get_return_code() == ReturnCode.OK
    answer["DXO"]["data"]["w"] = torch.zeros(2)
    HarmoFLExecutor().handle_event(EventType.AFTER_TASK_RESULT_FILTER, context(answer))
    assert sent.get_return_code() == ReturnCode.EXECUTION_EXCEPTION, "FLARE sends the object that it has"
    assert "DXO" not in sent
    code, line = read_error(sent)
    assert code == "MessageError"
    assert line == "site HK: the answer cannot be sent: DXO.data.w is of type torch.Tensor"


def test_an_answer_of_the_executor_itself_is_looked_at_before_any_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    # a privacy filter would refuse it too, without saying why
    packed = pack_update(UpdateMessage({"w": np.zeros(2, np.float32)}, None, {"steps": 1}))
    packed["DXO"]["data"]["w"] = np.array([None])
    executor = HarmoFLExecutor()
    monkeypatch.setattr(executor, "_perform", lambda *_: packed)
    answer = executor.execute("train", Shareable(), context(packed), Signal())
    assert read_error(answer)[1] == "site HK: the answer cannot be sent: DXO.data.w is an array of object"
