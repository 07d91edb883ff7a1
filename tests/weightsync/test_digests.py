import torch

from ebbtide.weightsync.delta import ChangeFilter
from ebbtide.weightsync.digests import bucket_digest, chain, hex_digest, tensor_digest
from ebbtide.weightsync.messages import Entry

ENTRY = Entry("a", "float32", (4,), 0, 0, 4)


def test_a_bucket_digest_covers_bytes_names_shapes_and_places() -> None:
    payload = memoryview(bytes(range(16)))
    base = bucket_digest(payload, (ENTRY,))
    others = [
        bucket_digest(memoryview(bytes(range(1, 17))), (ENTRY,)),
        bucket_digest(payload, (Entry("b", "float32", (4,), 0, 0, 4),)),
        bucket_digest(payload, (Entry("a", "int32", (4,), 0, 0, 4),)),
        bucket_digest(payload, (Entry("a", "float32", (2, 2), 0, 0, 4),)),
        bucket_digest(payload, (Entry("a", "float32", (4,), 4, 0, 4),)),
        bucket_digest(payload, ()),
    ]
    assert len({base, *others}) == 7
    assert bucket_digest(payload, (ENTRY,)) == base


def test_a_chain_depends_on_order_and_is_none_without_digests() -> None:
    assert chain(None, None) is None
    assert chain(chain(None, 1), 2) != chain(chain(None, 2), 1)
    assert hex_digest(chain(None, 1)) == f"{chain(None, 1):016x}"


def test_a_tensor_digest_covers_its_description() -> None:
    assert tensor_digest(memoryview(b"1234"), "int8(4,)") != tensor_digest(memoryview(b"1234"), "int8(2, 2)")


def test_the_filter_compares_with_the_last_push_that_was_committed() -> None:
    changes = ChangeFilter()
    a, b = torch.zeros(3), torch.ones(3)

    def names(is_full: bool = False) -> list[str]:
        return [name for name, _ in changes.select([("a", a), ("b", b)], is_full=is_full)]

    bases = [changes.base]
    assert names() == ["a", "b"]
    changes.commit(1)
    a[0] = -0.0  # equal as a number, another as bits
    assert names() == ["a"]
    changes.abort()
    bases.append(changes.base)
    assert names() == ["a"]
    changes.commit(2)
    assert (names(), names(is_full=True)) == ([], ["a", "b"])
    assert [*bases, changes.base] == [None, 1, 2]
