"""An answer encrypted by FLARE's homomorphic filters is refused by name: nothing here reads ciphertext. A34."""

from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.fl_constant import ReservedKey
from nvflare.app_common.app_constant import AppConstants
from toy_answers import aggregate, refused


def test_a34_an_encrypted_difference_is_refused_as_a_whole(healthy, numbers):
    aggregator, run, context = healthy()
    # what HEModelEncryptor leaves: serialized CKKS vectors, and a mark in the meta
    data = {"w": b"ciphertext", "scale": b"ciphertext", "count": b"ciphertext"}
    meta = {"harmofl.numbers": numbers, MetaKey.PROCESSED_ALGORITHM: "_he_algorithm_"}
    sent = DXO(DataKind.WEIGHT_DIFF, data=data, meta=meta).to_shareable()
    sent.add_cookie(AppConstants.CONTRIBUTION_ROUND, 4)
    sent.set_peer_props({ReservedKey.IDENTITY_NAME: "B"})
    reason = refused(aggregator, run, context, sent)
    assert "count" in reason or "scale" in reason or "w " in reason
    assert aggregate(aggregator, context)["w"].tolist() == [[2.0] * 3] * 2
