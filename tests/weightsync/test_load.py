import pytest
import torch

from ebbtide.errors import WeightSyncError
from ebbtide.weightsync.load import CopyInto


def test_weights_are_copied_cast_and_laid_out_as_the_target_is() -> None:
    targets = {
        "big": torch.zeros(64, 64),
        "cast": torch.zeros(3, dtype=torch.bfloat16),
        "transposed": torch.zeros(3, 2).T,
        "parameter": torch.nn.Parameter(torch.zeros(2)),
    }
    source = torch.arange(4096.0).reshape(64, 64)
    with torch.no_grad():
        CopyInto(targets)(
            [
                ("big", source),
                ("cast", torch.ones(3)),
                ("transposed", torch.tensor([[1.0, 2, 3], [4, 5, 6]])),
                ("parameter", torch.ones(2)),
            ]
        )
    assert torch.equal(targets["big"], source)
    assert targets["cast"].tolist() == [1, 1, 1]
    assert targets["transposed"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert targets["parameter"].tolist() == [1, 1]


@pytest.mark.parametrize("target", [torch.zeros(2, 3), torch.zeros(3, 2).T])
def test_slices_go_to_their_place(target: torch.Tensor) -> None:
    consumer = CopyInto({"a": target})
    consumer.load_slice("a", (2, 3), 0, torch.tensor([1.0, 2]))
    consumer.load_slice("a", (2, 3), 2, torch.tensor([3.0, 4, 5, 6]))
    assert target.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_unknown_names_and_other_shapes_are_errors() -> None:
    consumer = CopyInto({"model.norm.weight": torch.zeros(2)})
    with pytest.raises(WeightSyncError, match=r"none of the 1 here\. Did you mean 'model\.norm\.weight'\?"):
        consumer([("model.norm.weights", torch.zeros(2))])
    with pytest.raises(WeightSyncError, match=r"has shape \(3,\), the one here \(2,\)"):
        consumer([("model.norm.weight", torch.zeros(3))])
