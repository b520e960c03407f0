"""Laws of the ledger, under any order of acks, losses, late writers, stops and restarts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.driver.ledger import Ledger
from sweeps.driver.parts import Closed, LedgerError, Needs, Part, split
from sweeps.folder.commits import unit_order


@dataclass
class World:
    """A folder of commits, replicas that may be zombies, and a driver that may restart. Commits: first writer wins."""

    roots: dict[str, list[str | None]]
    """Root -> trunk of each cell (None: no trunk)."""
    poison_cells: set[tuple[str, int]] = field(default_factory=set)
    poison_trunks: set[str] = field(default_factory=set)
    commits: dict[str, Closed] = field(default_factory=dict)
    zombies: list[str] = field(default_factory=list)
    held_trunks: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    """Root -> the part of the plan it entered with (0 if not said)."""
    rounds: list[tuple[int, list[str]]] = field(default_factory=list)
    """Retries that drivers reopened: (last part of the plan then, names)."""

    def needs(self, root: str, cells: int) -> Needs:
        trunks = [t for p, t in enumerate(self.roots[root]) if cells >> p & 1 and t]
        return Needs(trunks=tuple(dict.fromkeys(trunks)))

    def shared(self) -> set[str]:
        seen: dict[str, set[str]] = {}
        for root, trunks in self.roots.items():
            for trunk in trunks:
                seen.setdefault(trunk, set()).add(root)
        return {t for t, users in seen.items() if t and len(users) > 1}

    def ledger(self) -> Ledger:
        ledger, shared = Ledger(self.needs), self.shared()
        for root, trunks in self.roots.items():
            needed = tuple(dict.fromkeys(t for t in trunks if t in shared))
            ledger.add(root, len(trunks), needs=Needs(trunks=needed), part=self.parts.get(root, 0))
        for part, names in self.rounds:
            ledger.reopen(names, part)
        for name in sorted(self.commits, key=unit_order):
            ledger.close(self.commits[name])
        return ledger

    def put(self, commit: Closed) -> Closed:
        """Create if absent, and return what stands."""
        standing = self.commits.setdefault(commit.unit, commit)
        if standing is commit:
            for trunk in commit.trunks:
                self.held_trunks.setdefault(trunk, []).append(commit.unit)
        return standing

    def finish(self, ledger: Ledger, name: str, rng: random.Random, stop: bool = False) -> Closed | None:
        """What a replica that survives this unit would write, as it saw the folder when it was handed the unit."""
        root, cells = ledger.root_of(name), ledger.cells_of(name)
        own = [t for t in ledger.unheld_trunks(name)]
        done = 0
        for p in range(cells.bit_length()):
            if cells >> p & 1 and not (stop and rng.random() < 0.5):
                done |= 1 << p
        rest = cells & ~done
        if not done and stop and cells:
            return None
        failed = sum(1 << p for p in range(done.bit_length()) if done >> p & 1 and rng.random() < 0.1)
        mine = {self.roots[root][p] for p in range(done.bit_length()) if done >> p & 1}
        trunks = tuple(t for t in own if not cells or t in mine)
        children = {f"{name}.0": Part(cells=rest)} if rest else {}
        return Closed(unit=name, held=done & ~failed, failed=failed, trunks=trunks, children=children)

    def kills(self, ledger: Ledger, name: str) -> bool:
        root, cells = ledger.root_of(name), ledger.cells_of(name)
        own = set(ledger.unheld_trunks(name))
        return bool(own & self.poison_trunks) or any(root == r and cells >> p & 1 for r, p in self.poison_cells)


def belongs_once(world: World, ledger: Ledger) -> None:
    for root, trunks in world.roots.items():
        owners = [ledger.owner(root, p) for p in range(len(trunks))]
        claims: dict[int, list[str]] = {p: [] for p in range(len(trunks))}
        for name in ledger._units:
            if ledger.root_of(name) != root:
                continue
            commit = world.commits.get(name)
            mine = ledger.cells_of(name)
            if commit is not None and not ledger.is_open(name):
                mine = commit.held | (0 if f"{name}.r" in ledger._units else commit.failed)
            for p in claims:
                if mine >> p & 1:
                    claims[p].append(name)
        assert {p: [o] for p, o in enumerate(owners)} == claims


def condemn(world: World, ledger: Ledger, verdicts: dict[str, str]) -> None:
    """What the driver does with a verdict."""
    for name, verdict in verdicts.items():
        root, cells, own = ledger.root_of(name), ledger.cells_of(name), ledger.unheld_trunks(name)
        if verdict == "split":
            trunk_of = {p: world.roots[root][p] for p in range(cells.bit_length()) if cells >> p & 1}
            a, b = split(trunk_of, own)
            assert not a.cells & b.cells and a.cells | b.cells == cells
            ledger.close(world.put(Closed(unit=name, children={f"{name}.0": a, f"{name}.1": b})))
        elif verdict == "fail":
            ledger.close(world.put(Closed(unit=name, failed=cells, failed_trunks=own)))
    while orphans := ledger.orphans():
        for name, trunk, _ in orphans:
            ledger.close(world.put(Closed(unit=name, failed=ledger.cells_of(name), failed_trunks=(trunk,))))


def plans():
    trunk = st.sampled_from([None, "t0", "t1", "t2", "t3"])
    return st.lists(st.lists(trunk, min_size=1, max_size=6), min_size=1, max_size=4).map(
        lambda units: {f"u{i}": cells for i, cells in enumerate(units)}
    )


@settings(max_examples=150, deadline=None)
@given(roots=plans(), seed=st.integers(0, 10**6), poison=st.booleans())
def test_each_cell_belongs_to_one_unit_at_every_moment(roots, seed, poison):
    rng = random.Random(seed)
    world = World(roots)
    if poison:
        root = rng.choice(list(roots))
        world.poison_cells = {(root, rng.randrange(len(roots[root])))}
        world.poison_trunks = {rng.choice(["t0", "t1"])}
    ledger = world.ledger()
    replicas = ["r0", "r1"]
    for step in range(400):
        if ledger.complete:
            break
        calm = step > 60
        replica = rng.choice(replicas)
        event = rng.random()
        if event < 0.5 and len(ledger.running(replica)) < 2:
            name = ledger.take(replica)
            if name:
                assert ledger.is_open(name)
                for trunk in ledger.unheld_trunks(name):
                    others = [u for r in replicas for u in ledger.running(r) if u != name]
                    assert all(trunk not in ledger.unheld_trunks(o) for o in others), "a trunk is sampled by one unit"
        elif event < 0.85 and ledger.running(replica):
            running = ledger.running(replica)
            if any(world.kills(ledger, name) for name in running):
                condemn(world, ledger, ledger.lost(replica, counts=True))
            else:
                name = rng.choice(running)
                commit = world.finish(ledger, name, rng, stop=not calm and rng.random() < 0.2)
                if commit is None:
                    ledger.give_back(name)
                else:
                    ledger.close(world.put(commit))
        elif event < 0.93 and not calm and ledger.running(replica):
            running = ledger.running(replica)
            late = {name: world.finish(ledger, name, rng) for name in running if not world.kills(ledger, name)}
            committed = tuple(world.put(c) for c in late.values() if rng.random() < 0.3)
            condemn(world, ledger, ledger.lost(replica, counts=rng.random() < 0.5, commits=committed))
            for name, commit in late.items():  # a replica declared dead goes on writing
                if rng.random() < 0.5 and ledger.is_open(name):
                    ledger.close(world.put(commit))
        elif event < 0.96 and not calm:
            before = {(root, p): ledger.owner(root, p) for root in roots for p in range(len(roots[root]))}
            ledger = world.ledger()
            assert before == {(root, p): ledger.owner(root, p) for root in roots for p in range(len(roots[root]))}
            condemn(world, ledger, {})
        belongs_once(world, ledger)
        assert not ledger.stuck
        assert ledger.num_cells == sum(map(len, roots.values()))
    assert ledger.complete, ledger.waiting()
    assert ledger.num_held + ledger.num_failed == ledger.num_cells
    for trunk, holders in world.held_trunks.items():
        assert len(holders) == 1, (trunk, holders)
    for root, position in world.poison_cells:
        owner = ledger.owner(root, position)
        assert world.commits[owner].failed >> position & 1
    if not world.poison_cells and not world.poison_trunks:
        belongs_once(world, world.ledger())


@settings(max_examples=200, deadline=None)
@given(first=plans(), later=plans(), seed=st.integers(0, 10**6))
def test_drivers_that_take_over_never_commit_a_cell_or_a_trunk_twice(first, later, seed):
    """Drivers with and without retries, over growing plans; what each dispatched may be written at any later time."""
    rng, world, zombies = random.Random(seed), World(dict(first)), []
    committed: set[tuple[str, int]] = set()

    def outcome(ledger: Ledger, name: str) -> Closed | None:
        """What a replica makes of a unit, from what it knew when it was handed it."""
        root, cells, own = ledger.root_of(name), ledger.cells_of(name), ledger.unheld_trunks(name)
        bad = {t for t in own if rng.random() < 0.4}
        failed = sum(1 << p for p, t in enumerate(world.roots[root]) if cells >> p & 1 and t in bad)
        good = world.finish(ledger, name, rng, stop=rng.random() < 0.3)
        if good is None and not failed:
            return None
        good = good or Closed(unit=name, children={f"{name}.0": Part(cells=cells)})
        parts = {child: Part(cells=part.cells & ~failed) for child, part in good.children.items()}
        return Closed(
            unit=name, held=good.held & ~failed, failed=good.failed & ~failed | failed,
            trunks=tuple(t for t in good.trunks if t not in bad), failed_trunks=tuple(bad),
            children={child: part for child, part in parts.items() if part.cells},
        )  # fmt: skip

    def late() -> None:
        while zombies and rng.random() < 0.5:
            world.put(zombies.pop(rng.randrange(len(zombies))))

    for number in range(6):
        if number == 3:
            world.parts |= dict.fromkeys((f"{root}x" for root in later), 1)
            world.roots |= {f"{root}x": trunks for root, trunks in later.items()}
        ledger = world.ledger()
        condemn(world, ledger, {})
        if rng.random() < 0.5 and (names := ledger.retriable()):
            part = max(world.parts.values(), default=0)
            world.rounds.append((part, names))
            ledger.reopen(names, part)
            assert ledger.retriable() == []
        belongs_once(world, ledger)
        for _ in range(rng.randrange(12)):
            late()
            name = ledger.take("r")
            if name is None:
                break
            commit = outcome(ledger, name)
            if commit is None:
                ledger.give_back(name)
            elif rng.random() < 0.5:
                zombies.append(commit)
                ledger.lost("r", counts=False)
            else:
                ledger.close(world.put(commit))
                condemn(world, ledger, {})
            belongs_once(world, ledger)
        held = {(ledger.root_of(c.unit), p) for c in world.commits.values() for p in range(8) if c.held >> p & 1}
        assert committed <= held and len(held) == sum(c.held.bit_count() for c in world.commits.values())
        committed = held
    while zombies:
        late()
    belongs_once(world, world.ledger())
    assert all(len(holders) == 1 for holders in world.held_trunks.values()), world.held_trunks


def test_a_poison_cell_ends_alone_and_the_others_are_held():
    world = World({"u": [None] * 8}, poison_cells={("u", 5)})
    ledger = world.ledger()
    for _ in range(100):
        if ledger.complete:
            break
        name = ledger.take("r")
        if world.kills(ledger, name):
            condemn(world, ledger, ledger.lost("r", counts=True))
        else:
            root_cells = ledger.cells_of(name)
            ledger.close(world.put(Closed(unit=name, held=root_cells)))
    assert ledger.complete and ledger.num_failed == 1 and ledger.num_held == 7
    assert world.commits[ledger.owner("u", 5)].failed == 1 << 5


def test_a_poison_trunk_is_parted_from_its_cells_and_fails_them():
    world = World({"u": ["t0", "t0", "t1"]}, poison_trunks={"t0"})
    ledger = world.ledger()
    for _ in range(50):
        if ledger.complete:
            break
        name = ledger.take("r")
        if world.kills(ledger, name):
            condemn(world, ledger, ledger.lost("r", counts=True))
        else:
            ledger.close(world.put(Closed(unit=name, held=ledger.cells_of(name), trunks=ledger.unheld_trunks(name))))
    assert ledger.complete and ledger.num_failed == 2 and ledger.num_held == 1
    assert world.commits["u.0.0"].failed_trunks == ("t0",) and world.commits["u.0.1"].failed == 0b11


def test_deaths_count_only_alone_and_units_then_run_alone():
    ledger = Ledger()
    for name in "abc":
        ledger.add(name, 1)
    assert (ledger.take("r"), ledger.take("r")) == ("a", "b")
    assert ledger.lost("r", counts=True) == {"a": "again", "b": "again"}
    assert ledger.deaths("a") == 0
    assert ledger.take("r2") == "a" and ledger.take("r2") is None, "a runs alone"
    assert ledger.take("r3") == "b"
    assert [ledger.lost("r2", counts=True), ledger.deaths("a")] == [{"a": "again"}, 1]
    assert ledger.take("r3") is None
    assert ledger.take("r2") == "a" and ledger.lost("r2", counts=False) == {"a": "again"} and ledger.deaths("a") == 1
    for expected in ("again", "fail"):
        ledger.take("r2")
        assert ledger.lost("r2", counts=True)["a"] == expected


def test_a_busy_replica_drains_for_a_unit_that_must_be_alone():
    ledger = Ledger()
    for name in "abcdef":
        ledger.add(name, 1)
    ledger.take("r"), ledger.take("r")
    ledger.take("s"), ledger.take("s")
    ledger.lost("r", counts=True)
    assert ledger.take("s") is None
    ledger.close(Closed(unit="c", held=1))
    assert ledger.take("s") is None, "it drains"
    ledger.close(Closed(unit="d", held=1))
    assert ledger.take("s") == "a"


def test_a_trunk_passes_to_the_next_unit_in_plan_order():
    ledger = Ledger(lambda root, cells: Needs(trunks=("t",)))
    for name in "abc":
        ledger.add(name, 2, needs=Needs(trunks=("t",)))
    assert ledger.take("r") == "a" and ledger.take("r") is None and ledger.waiting() == ["b", "c"]
    ledger.close(Closed(unit="a", failed=0b11, failed_trunks=("t",)))
    assert ledger.take("r") == "b" and ledger.take("r") is None
    ledger.close(Closed(unit="b", held=0b01, trunks=("t",), children={"b.0": Part(cells=0b10)}))
    assert ledger.holder("t") == "b"
    assert [ledger.take("r"), ledger.take("r")] == ["b.0", "c"] and ledger.unheld_trunks("b.0") == ()
    assert ledger.retriable() == ["a.r"]
    ledger.reopen(["a.r"])
    assert ledger.unheld_trunks("a.r") == () and ledger.retriable() == []


def test_recipients_wait_for_donors_in_other_units():
    ledger = Ledger()
    ledger.add("donor", 3)
    ledger.add("recipient", 1, needs=Needs(donors={"donor": 0b010}))
    assert ledger.take("r") == "donor" and ledger.take("r") is None
    ledger.close(Closed(unit="donor", held=0b001, children={"donor.0": Part(cells=0b110)}))
    assert ledger.take("r") == "donor.0" and ledger.take("r") is None
    ledger.close(Closed(unit="donor.0", held=0b100, failed=0b010))
    assert ledger.take("r") == "recipient"


@pytest.mark.parametrize(
    ("commit", "says"),
    [
        (Closed(unit="nobody", held=1), "neither the plan"),
        (Closed(unit="a", held=0b01), "accounts for 1 cells where the plan gives it 2"),
        (Closed(unit="a", held=0b11, failed=0b10), "twice"),
        (Closed(unit="a", held=0b01, children={"b.0": Part(cells=0b10)}), "as its child"),
    ],
)
def test_a_commit_that_contradicts_the_plan_is_refused(commit, says):
    ledger = Ledger()
    ledger.add("a", 2)
    with pytest.raises(LedgerError, match=says):
        ledger.close(commit)
    assert ledger.is_open("a")


def test_split_keeps_donors_before_recipients():
    cells = dict.fromkeys(range(6), "t")
    donors = {0: (5,), 1: (4,)}
    first, second = split(cells, (), donors)
    for recipient, (donor,) in donors.items():
        assert not (first.cells >> recipient & 1 and second.cells >> donor & 1)
    assert first.cells | second.cells == 0b111111 and not first.cells & second.cells
