"""Laws of the cache: found by any filter as by a plain scan, and quickly; tensors of its own; read is as written."""

import copy
import dataclasses
import pickle
import time

import pytest
import torch

from interlens.interp import ANY, ActivationCache, ActivationRecord, CaptureSpec, Select, offload_to_cpu
from tests.support.unchecked import unchecked


def record(participant="bob", message=0, layer=1, site="residual", pool=None, sample=None, rows=4, value=0.0, **more):
    return ActivationRecord(
        participant, message, layer, site, torch.full((rows, 8), value), (1, rows),
        {"prompt": (0, 1), "answer": (1, rows)}, tokens=tuple(range(rows)), positions=tuple(range(rows)), pool=pool,
        sample=sample, **more,
    )  # fmt: skip


def many() -> list[ActivationRecord]:
    return [
        record(who, message, layer, site, pool, sample, value=float(n))
        for n, (who, message, layer, site, pool, sample) in enumerate(
            (w, m, i, s, p, k)
            for w in ("alice", "bob") for m in range(3) for i in (0, 4) for s in ("residual", "mlp")
            for p in (None, "mean") for k in (None, 0, 1)
        )
    ]  # fmt: skip


@pytest.mark.parametrize("early", [True, False])
def test_queries_equal_a_scan_whether_indexed_before_or_after(early):
    cache, records = ActivationCache(), many()
    filters = [
        dict(), dict(participant="bob"), dict(layer=4, site="mlp"), dict(message_idx=0, layer=0, pool=None),
        dict(sample=None), dict(sample=1, participant="alice"), dict(pool="mean", site="resid_post"), dict(layer=9),
    ]  # fmt: skip
    if early:
        for given in filters:
            cache.query(**given)
    cache.add_batch(records[:40])
    for item in records[40:]:
        cache.add(item)
    for given in filters:
        wanted = [
            r.tensor[0, 0].item()
            for r in records
            if all(getattr(r, k) == ("residual" if v == "resid_post" else v) for k, v in given.items())
        ]
        assert [r.tensor[0, 0].item() for r in cache.query(**given)] == wanted
    assert len(cache) == len(records) and [r.layer for r in cache] == [r.layer for r in records]


def test_at_gives_the_one_or_says_what_tells_the_others_apart():
    cache = ActivationCache()
    cache.add_batch(many())
    found = cache.at(participant="bob", message_idx=2, layer=4, sample=None)
    assert found.shape == (4, 8)
    with pytest.raises(KeyError, match=r"3 records match participant='bob'.*they differ in sample in \[None, 0, 1\]"):
        cache.at(participant="bob", message_idx=2, layer=4)
    with pytest.raises(KeyError, match=r"0 records match .*layer=7.*layer in \[0, 4\]"):
        cache.at(participant="bob", message_idx=2, layer=7, pool=ANY)
    with pytest.raises(KeyError, match="the cache is empty"):
        ActivationCache().at(layer=1)


def test_ten_thousand_lookups_among_a_hundred_thousand_records_take_under_a_second():
    cache = ActivationCache(offload=None)
    shared = torch.zeros(1, 2)
    for n in range(100_000):
        cache._append(ActivationRecord("ab"[n % 2], n // 20, n % 20 // 2, "residual", shared, (1, 1)))
    start = time.process_time()
    for n in range(10_000):
        cache.at(participant="ab"[n % 2], message_idx=n // 20, layer=n % 20 // 2)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("offload", ["cpu", None])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_tensors_are_compact_unaliased_and_can_be_trained_on(offload, guard):
    big = torch.randn(100, 16)
    with guard():
        live = big * 2
        cache = ActivationCache(offload=offload)
        item = record()
        item.tensor = live[3:5, :4]
        cache.add(item)
        expected = live[3:5, :4].clone()
        live.zero_()
    kept = cache.records[0].tensor
    assert torch.equal(kept, expected) and item.tensor is not kept
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    assert not kept.is_inference()
    probe = torch.nn.Linear(4, 1)
    probe(kept).sum().backward()
    assert probe.weight.grad is not None


def test_a_batch_moves_in_order_whatever_its_shapes():
    assert offload_to_cpu([]) == []
    tensors = [
        torch.randn(3, 4),
        torch.randn(5, 4).bfloat16(),
        torch.randn(3, 4),
        torch.randn(4, 3).T,
        torch.tensor(2.0),
    ]
    moved = offload_to_cpu(tensors)
    for before, after in zip(tensors, moved, strict=True):
        assert torch.equal(before, after) and before.dtype == after.dtype
        assert after.untyped_storage().nbytes() == after.numel() * after.element_size()
        assert after.untyped_storage().data_ptr() != before.untyped_storage().data_ptr()


@pytest.mark.gpu
def test_a_batch_moves_from_a_device_compact_and_in_order():
    tensors = [torch.randn(3, 4, device="cuda") for _ in range(5)] + [torch.randn(2, 4), torch.randn(9, 4).cuda()[2:4]]
    moved = offload_to_cpu(tensors)
    for before, after in zip(tensors, moved, strict=True):
        assert after.device.type == "cpu" and torch.equal(before.cpu(), after) and not after.is_pinned()
        assert after.untyped_storage().nbytes() == after.numel() * after.element_size()


def test_written_then_read_is_the_same(tmp_path):
    cache = ActivationCache()
    cache.add_batch(many())
    odd = record(value=1.0, selection="answer", fingerprint="abc", num_pooled=3)
    odd.tensor = odd.tensor.bfloat16()
    cache.add(odd)
    cache.skipped.append("gpt")
    cache.save(tmp_path / "c.safetensors")
    again = ActivationCache.load(tmp_path / "c.safetensors")
    assert len(again) == len(cache) and again.skipped == ["gpt"] and again.offload == "cpu"
    for a, b in zip(cache, again, strict=True):
        assert torch.equal(a.tensor, b.tensor) and a.tensor.dtype == b.tensor.dtype
        left, right = dict(vars(a)), dict(vars(b))
        del left["tensor"], right["tensor"]
        assert left == right
    torch.testing.assert_close(
        again.at(participant="bob", message_idx=2, layer=4, sample=None), cache.records[-13].tensor
    )
    (tmp_path / "no").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match="without an activation index"):
        ActivationCache.load(tmp_path / "no")


def test_records_stack_and_group():
    cache = ActivationCache()
    cache.add_batch([record("bob", m, 1, pool="mean", rows=1, value=float(m)) for m in range(3)])
    cache.add_batch([record("alice", m, 1, rows=m + 2, value=float(m)) for m in range(2)])
    stacked, rows = cache.stack(participant="bob", layer=1, pool="mean")
    assert stacked[:, 0].tolist() == [0, 1, 2] and [r.message_idx for r in rows] == [0, 1, 2]
    joined, rows = cache.stack(participant="alice", layer=1, pool=None)
    assert joined.shape == (5, 8) and [len(r.tensor) for r in rows] == [2, 3]
    assert {key: len(group) for key, group in cache.groups("participant", "pool")} == {
        ("bob", "mean"): 3,
        ("alice", None): 2,
    }
    with pytest.raises(KeyError, match="no records match"):
        cache.stack(layer=5)
    cache.add(ActivationRecord("bob", 0, 1, "router", torch.zeros(1, 6), (1, 1), pool="mean"))
    with pytest.raises(ValueError, match="widths"):
        cache.stack(layer=1, pool="mean")


def test_capture_specs_are_normal_and_checked():
    assert CaptureSpec("mlp", 3) == CaptureSpec(("mlp",), (3,))
    assert CaptureSpec(("mlp", "mlp")).sites == ("mlp",)
    for arguments, why in [
        (dict(sites="resid_md"), "no site 'resid_md'"),
        (dict(sites=()), "names no site"),
        (dict(pool="median"), "'median'"),
        (dict(source="both"), "'both'"),
        (dict(offload="disk"), "'disk'"),
    ]:
        with pytest.raises(ValueError, match=why):
            CaptureSpec(**arguments)
    with unchecked(), pytest.raises(ValueError, match="must be a Select"):
        CaptureSpec(tokens=3)
    assert CaptureSpec(tokens=Select.prompt()).tokens == Select.prompt()


@pytest.mark.parametrize("change", [
    lambda records, r: records.append(r), lambda records, r: records.extend([r]), lambda records, r: records.insert(0, r),
    lambda records, r: records.__setitem__(0, r), lambda records, r: records.__iadd__([r]),
    lambda records, r: records.__setitem__(slice(0, 0), [r]),
    lambda records, r: records.pop(), lambda records, r: records.clear(), lambda records, r: records.reverse(),
    lambda records, r: records.__delitem__(0), lambda records, r: records.sort(key=lambda each: -each.layer),
    lambda records, r: records.remove(records[1]) if False else records.pop(1),
])  # fmt: skip
def test_whatever_is_done_to_the_records_counts_at_the_next_query(change):
    cache = ActivationCache()
    cache.add_batch(many())
    new = dataclasses.replace(many()[0], layer=9, participant="eve")
    for given in (dict(layer=9), dict(participant="eve"), dict(layer=0), dict(participant="bob", layer=4)):
        cache.query(**given)  # its index is made
        change(cache.records, new)
        fresh = [r for r in cache.records if all(getattr(r, name) == value for name, value in given.items())]
        found = cache.query(**given)
        assert len(found) == len(fresh) and all(a is b for a, b in zip(found, fresh, strict=True))
        cache.add(new)
        assert len(cache.query(layer=9)) == sum(r.layer == 9 for r in cache.records)
    cache.query(layer=9)
    cache.records = [new]
    assert cache.query(layer=9) == [new] and cache.query(layer=0) == []
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    copied.records.append(new)
    assert len(copied.query(layer=9)) == 2 and len(cache.query(layer=9)) == 1


@pytest.mark.parametrize("offload", ["cuda:0", "cuda", "CPU", "", False, torch.device("cpu"), 0])
def test_a_place_where_nothing_is_offloaded_to_is_refused(offload):
    for make in (ActivationCache, lambda offload: CaptureSpec(offload=offload)):
        with unchecked(), pytest.raises(ValueError, match="cannot offload to"):
            make(offload=offload)


def test_at_says_what_every_record_is():
    cache = ActivationCache()
    cache.add_batch([dataclasses.replace(r, pool="mean", num_pooled=4, tensor=r.tensor[:1].float()) for r in many()])
    with pytest.raises(KeyError, match=r"no record has pool=None: every one has pool='mean'"):
        cache.at(participant="bob", message_idx=2, layer=4, sample=None)


def test_a_cache_shows_itself_in_a_line_and_as_a_table_with_everything_escaped():
    cache = ActivationCache()
    cache.add_batch([*many(), dataclasses.replace(many()[0], participant="<script>")])
    assert len(repr(cache)) < 300 and f"{len(cache)} records" in repr(cache)
    assert "<script>" not in cache._repr_html_() and "&lt;script&gt;" in cache._repr_html_()
    assert "0 records" in repr(ActivationCache())
