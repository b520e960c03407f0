"""Laws of the configuration: the impossible is refused in one line, the possible has its defaults written out."""

import json

import pytest

from interlens.interp.select import Select
from sweeps.compose import job_hash, load
from sweeps.config.grid import conditions
from sweeps.config.schema import SweepConfig
from sweeps.config.tokens import parse_tokens
from sweeps.errors import ConfigError
from sweeps.plan import items
from sweeps.plan.normal import resolved
from tests.support import talk

BASE = ["scenario=topics", "scenario.items=[{id: a, topic: x}]"]


def test_what_is_loaded_travels_as_plain_values():
    config = load(["experiment=enthusiasm"])
    assert SweepConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.run.dir == "runs/enthusiasm" and config.cluster.replicas == 2
    assert [(axis.path, axis.labels) for axis in config.grid] == [("framing", ("warm", "cold"))]
    assert config.capture[0].participants == ("bob",) and config.capture[1].pool is None


@pytest.mark.parametrize(("overrides", "said"), [
    (["experiment=enthusiasim"], "did you mean 'enthusiasm'"),
    (["experiment=enthusiasm", "scenario.brunch.turns=3"], "unknown key 'scenario.brunch'; did you mean 'branch'"),
    (["experiment=enthusiasm", "run.dri=x"], "unknown key 'run.dri'; did you mean 'dir'"),
    (["experiment=enthusiasm", "scenrio.seed=1"], "unknown key 'scenrio'; did you mean 'scenario'"),
    (["experiment=enthusiasm", "capture.0.layrs=[1]"], "unknown key 'capture[0].layrs'; did you mean 'layers'"),
    (["experiment=enthusiasm", "cluster=gpux"], "no cluster 'gpux'; did you mean 'gpu'"),
    (["experiment=enthusiasm", "cluster.executor=rya"], "possible: ray, inline"),
    (["experiment=enthusiasm", "scenario.participants.bob.model=smolm2"], "did you mean 'smollm2'"),
    (["experiment=enthusiasm", "scenario.participants.bob.model=/no/such"], "no such file or folder"),
    (["experiment=enthusiasm", "capture.0.layers=[30]"], "no layer 30 in 'smollm2' (bob); it has 30, 0 to 29"),
    (["experiment=enthusiasm", "capture.0.layers=[-31]"], "no layer -31"),
    (["experiment=enthusiasm", "capture.0.layers=[-1,29]"], "names a layer twice"),
    (["experiment=enthusiasm", "capture.0.participants=[bop]"], "no participant 'bop'; did you mean 'bob'"),
    (["experiment=enthusiasm", "capture.0.participants=[]"], "participants is missing; name some of: alice, bob"),
    (["experiment=enthusiasm", "capture.0.tokens=answr"], "possible: all, prompt"),
    (["experiment=enthusiasm", "capture.0.tokens=\"window(4, 4)\""], "can never match"),
    (["experiment=enthusiasm", "capture.0.pool=median"], "possible: null, mean, last, max"),
    (["experiment=enthusiasm", "capture.0.sites=[residul]"], "no site 'residul'"),
    (["experiment=enthusiasm", "capture.0.turns=late"], "possible: branch, trunk, all"),
    ([], "no participants"),
    (["scenario=topics", "scenario.items=[]"], "no items"),
    (["scenario=topics", "scenario.items=nowhere.jsonl"], "no file 'nowhere.jsonl'"),
    ([*BASE, "scenario.participants.moderator={model: smollm2}"], "has the moderator's name"),
    ([*BASE, "scenario.branch.turns=0"], "at least 1"),
    ([*BASE, "scenario.branch.turns=many"], "must be a whole number, got 'many'"),
    ([*BASE, "scenario.branch.seeds=[1,1]"], "names a seed twice"),
    ([*BASE, "scenario.participants.bob.top_p=1.5"], "must lie in (0, 1]"),
    ([*BASE, "scenario.analyzers=[os.system]"], "write module:function"),
    ([*BASE, "scenario.analyzers=['nowhere.at_all:f']"], "cannot import 'nowhere.at_all:f'"),
    ([*BASE, "scenario.analyzers=['sweeps.analyzers:nothing']"], "cannot import"),
    ([*BASE, "scenario.branch.max_new_tokens=0"], "scenario.branch.max_new_tokens is 0; it must be at least 1"),
    ([*BASE, "scenario.trunk.temperature=-1"], "scenario.trunk.temperature is -1.0; it must be at least 0"),
    ([*BASE, "scenario.participants.bob.top_k=0"], "top_k is 0; it must be at least 1"),
    ([*BASE, "scenario.participants.bob.temperature=inf"], "must be a finite number, got inf"),
    ([*BASE, "grid.scenario.branch.temperature=[0.5,nan]"], "must hold finite numbers, got nan"),
    ([*BASE, "scenario.branch.seeds=[99999999999999999999]"], "is no seed"),
    ([*BASE, "scenario.opening='About {topc}'"], "no column {topc} in item 'a'; it has: id, topic"),
    ([*BASE, "grid.framing={a: '{mood}'}"], "no column {mood} in item 'a'"),
    ([*BASE, "grid.framing={a: x, b: x}"], "two points of the grid are the same cells: framing='a' and framing='b'"),
    ([*BASE, "grid.scenario.branch.temperature=[1,1.0]"], "two points of the grid are the same cells"),
    ([*BASE, "run.max_failures=-1"], "run.max_failures"),
    (["experiment=enthusiasm", "capture.0.turns=[2]"], "no turn 2; scenario.branch has 2, counted from 0"),
    (["experiment=enthusiasm", "capture.0.participants=[bob,bob]"], "names one twice"),
    ([*BASE, "aggregate=outcomes", "aggregate.outcomes.axs=x"], "options: axis"),
    ([*BASE, "grid.framing=[]"], "has no values"),
    ([*BASE, "grid.cluster.replicas=[1,2]"], "nothing there can make another cell"),
    ([*BASE, "grid.trunk.seeds=[1,2]"], "seeds are no axis"),
    ([*BASE, "grid.intervention.coef=[1,2]"], "this sweep has no intervention to vary; give it one (intervention=steer"),
    ([*BASE, "aggregate.directions={}"], "needs contrast, as in contrast: \"framing == 'warm' vs framing == 'cold'\""),
    (["experiment=enthusiasm", "aggregate.directions.splt=item"], "no option 'splt'; did you mean 'split'?"),
    (["experiment=enthusiasm", "aggregate.directions=[1]"], "aggregate.directions must be a mapping (key: value), got a"),
    (["experiment=enthusiasm", "aggregate.directions=3"], "aggregate.directions must be a mapping of options, got 3"),
    (["experiment=enthusiasm", "scenario.trunk=[2]"], "scenario.trunk must be a mapping (key: value), got a list"),
    (["scenario=[1]"], "scenario is a group: choose scenario=<none, topics>"),
    (["=3"], "cannot read the override '=3'"),
    (["experiment=enthusiasm", "capture.0.layers=all"], "a list of whole numbers or null, got 'all'"),
    ([*BASE, "cluster.num_cpus=-1"], "cluster.num_cpus is -1; it must be at least 0"),
    ([*BASE, "cluster.object_store_memory=1"], "it must be at least 80 000 000"),
    ([*BASE, "cluster.load_s=0"], "cluster.load_s is 0; it must be above 0 seconds"),
    ([*BASE, "models.smollm2.device=toaster"], "models.smollm2.device is 'toaster'; possible: auto, cpu, cuda"),
    ([*BASE, "scenario.participants.bob.thinking=maybe"], "thinking is 'maybe'; possible: auto, true, false"),
    ([*BASE, "scenario.participants.bob.provider=nope"], "provider is 'nope'; possible: null, openai"),
    ([*BASE, "scenario.moderator=''"], "scenario.moderator is empty"),
    ([*BASE, "grid.scenario.participants.bob.temprature=[1,2]"], "did you mean 'temperature'"),
    ([*BASE, "grid.scenario.participants.bob.temperature=[hot]"], "must be a number"),
    ([*BASE, "grid.scenario.opening=[a,b]"], "acts before the branch point"),
    ([*BASE, "intervention=steer"], "participants is missing"),
    ([*BASE, "intervention=steer", "intervention.participants=[bob]"], "direction is missing; possible: run:"),
    ([*BASE, "intervention=steer", "intervention.participants=[bob]", "intervention.direction=x:y"],
     "cannot read 'x:y'"),
    ([*BASE, "intervention=steer", "intervention.participants=[bob]", "intervention.direction=run:no/run:residual:3"],
     "no run folder 'no/run'"),
    (["experiment=enthusiasm", "capture.tokens=prompt"], "'tokens' is set below a list; name an entry of it by number"),
    (["experiment=enthusiasm", "aggregate.directions.contrast=\"item.topc == 'tea' vs item.topic == 'rain'\""],
     "no column 'item.topc' in \"item.topc == 'tea' vs item.topic == 'rain'\"; items have: id, topic"),
    (["capture=[{}]"], "capture is a group: choose capture=<answer_mean, none>"),
    (["a b"], "write key=value"),
    ([*BASE, "inputs.x=1"], "unknown key 'inputs'"),
    ([*BASE, "run.dir='  '"], "run.dir is empty"),
    ([*BASE, "cluster.resources={GPU: 1}"], "cluster.resources.GPU: set cluster.num_gpus"),
    ([*BASE, "scenario.participants.bob.prices={prompt: -1, completion: 2}"], "prices are -1 and 2; they"),
])  # fmt: skip
def test_the_impossible_is_refused_in_one_line(overrides, said):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "said"), [
    ("scenario: [a, b]", "experiment/e.yaml: a list stands where a mapping (key: value) belongs; capture, intervention"),
    ("scenario:\n  items: [a", "cannot read line 4 of "),
    ("aggregate: directions", "aggregate must be a mapping of aggregates to their options, got 'directions'"),
    ("defaults: [nope]", "no experiment 'nope'; known: enthusiasm"),
])  # fmt: skip
def test_a_file_that_says_something_else_is_told_in_plain_words(tmp_path, text, said):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "e.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load([f"hydra.searchpath=['file://{tmp_path}']", "experiment=e"])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_defaults_are_written_out(tmp_path):
    config = talk.config(tmp_path)
    assert config.capture[0].layers == (1, 3), "counted from the front"
    alone = talk.config(tmp_path, scenario={**talk.SCENARIO, "participants": {"bob": {"model": "tiny"}}},
                        capture={"layers": [0]})  # fmt: skip
    assert alone.capture[0].participants == ("bob",), "the only one there is"
    aliased = talk.config(tmp_path, capture={"participants": ["bob"], "sites": ["resid_post"]})
    assert aliased.capture[0].sites == ("residual",)


def test_a_norm_filter_at_capture_is_a_positive_number(tmp_path):
    assert talk.config(tmp_path, capture={"participants": ["bob"], "max_norm": 300}).capture[0].max_norm == 300.0
    with pytest.raises(ConfigError, match=r"capture\[0\].max_norm is 0.0; it must be above 0"):
        talk.config(tmp_path, capture={"participants": ["bob"], "max_norm": 0})


def test_a_contrast_that_no_condition_meets_is_refused(tmp_path):
    grid = {"framing": {"warm": "w", "cold": "c"}}
    capture = {"participants": ["bob"], "pool": "mean"}
    for contrast in ("framing == 'warm' vs framing == 'clod'", "framing == 'Warm' vs framing == 'cold'"):
        with pytest.raises(ValueError, match=r"no condition of the grid meets .* framing has 'warm', 'cold'"):
            talk.config(tmp_path, grid=grid, capture=capture, aggregate={"directions": {"contrast": contrast}})
    fine = {"directions": {"contrast": "framing != 'cold' vs framing == 'cold'"}}
    assert talk.config(tmp_path, grid=grid, capture=capture, aggregate=fine).aggregate


def test_axes_in_every_form(tmp_path):
    steer = {"kind": "steer", "participants": ["bob"], "direction": "random:1", "layers": [1]}
    grid = {
        "framing": {"warm": "w", "cold": "c", "none": None}, "trunk.temperature": [0, 1],
        "intervention": {"off": None, "on": steer}, "scenario": {"participants": {"bob": {"temperature": [0.5]}}},
    }  # fmt: skip
    config = talk.config(tmp_path, grid=grid)
    assert [axis.path for axis in config.grid] == [
        "framing", "trunk.temperature", "intervention", "scenario.participants.bob.temperature"
    ]  # fmt: skip
    points = list(conditions(config.grid))
    assert len(points) == 12 and points[0] == {
        "framing": "warm", "trunk.temperature": 0, "intervention": "off", "scenario.participants.bob.temperature": 0.5
    }  # fmt: skip
    under = resolved(config, {**points[-1], "framing": "none"})
    assert under.scenario.framing is None and under.scenario.trunk.temperature == 1.0
    assert under.intervention[0].direction == "random:1" and under.intervention[0].tokens == "branch"
    assert under.scenario.participants["bob"].temperature == 0.5
    nested = talk.config(
        tmp_path, intervention=steer, grid={"intervention": {"coef": [0, 4], "layers": {"a": [1], "b": [2]}}}
    )
    assert [(axis.path, axis.labels) for axis in nested.grid] == [
        ("intervention.coef", (0, 4)), ("intervention.layers", ("a", "b"))
    ]  # fmt: skip
    assert resolved(nested, {"intervention.layers": "b"}).intervention[0].layers == (2,)


@pytest.mark.parametrize(("text", "select"), [
    ("all", Select.all()), ("answer", Select.phase("answer")), 
    (" prompt | generated ", Select.prompt() | Select.generated()),
    ("window(0, 8, of=generated)", Select.window(0, 8, of="generated")), ("message(2)", Select.message(2)),
    ("positions(3, -4)", Select.positions(3, -4)), ("(branch - special)", Select.branch() - Select.special()),
    ("generated - special | message(0)", (Select.generated() - Select.special()) | Select.message(0)),
    ("generated(lead=1)", Select.generated(lead=1)),
])  # fmt: skip
def test_tokens_are_read(text, select):
    assert parse_tokens(text) == select
    again = parse_tokens(str(select).replace("generated(0)", "generated"))
    assert again == select, "what Select prints is read too"


@pytest.mark.parametrize("text", [
    "__import__('os').system('true')", "answer + prompt", "window", "message('x', 1, 2, 3)", "1", "", "all.x",
    "phase(answr)",
    "(" * 500 + "all" + ")" * 500, "message(1) if 1 else all", "positions(10**9)",
])  # fmt: skip
def test_tokens_are_never_evaluated(text):
    with pytest.raises(ConfigError, match="cannot read"):
        parse_tokens(text)


def test_items_in_every_form(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"id": "a", "topic": "x"}, {"id": "1", "topic": "y"}]
    (tmp_path / "i.jsonl").write_text('{"id": "a", "topic": "x"}\n\n{"topic": "y"}\n')
    (tmp_path / "i.yaml").write_text("- {id: a, topic: x}\n- {topic: y}\n")
    pq.write_table(pa.table({"id": ["a", None], "topic": ["x", "y"]}), tmp_path / "i.parquet")
    for name in ("i.jsonl", "i.yaml", "i.parquet"):
        assert list(items.read(str(tmp_path / name))) == rows
    assert list(items.read(({"topic": "x", "id": "a"}, {"topic": "y"}))) == rows
    for bad, said in ((({"id": 1}, {"id": "1"}), "share the id '1'"), (({"x": float("nan")},), "no NaN"),
                      ((3,), "no mapping"),
                      (({"x": object()},), "is a object")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            list(items.read(bad))
    (tmp_path / "bad.jsonl").write_text("{}\n{\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(items.read(str(tmp_path / "bad.jsonl")))


def test_columns_fill_texts_and_reach_nothing_else():
    row = {"id": "a", "topic": "tea", "n": 3}
    assert items.fill("On {topic}, {n} {{x}}", row, "opening") == "On tea, 3 {x}"
    assert items.fill(None, row, "opening") is None
    for text in ("{topics}", "{topic.__class__}", "{topic!r}", "{}", "{topic", "topic}"):
        with pytest.raises(ConfigError, match="it has: id, topic, n"):
            items.fill(text, row, "opening")


def test_a_jobs_name_follows_its_content():
    one = job_hash(["++intervention.coef=4", "scenario=a", "run.dir=x", "cluster.replicas=2"])
    assert one == job_hash(["scenario=a", "intervention.coef=4", "cluster=gpu", "report.transcripts=3"])
    assert one != job_hash(["scenario=a", "intervention.coef=8"])


@pytest.mark.parametrize(("name", "content", "said"), [
    ("late.jsonl", b'{"id": "a"}\n{"id": "b"}\n{oops\n', "line 3 of .* is no JSON"),
    ("twins.jsonl", b'{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n', "rows 0 and 2 of .* share the id 'a'"),
    ("latin.jsonl", b'{"id": "caf\xe9"}\n', "cannot read .*latin.jsonl' .*utf-8"),
    ("open.yaml", b"- {id: a, topic: [\n", "cannot read .*open.yaml"),
    ("cut.parquet", b"hello", "cannot read .*cut.parquet"),
])  # fmt: skip
def test_every_row_is_read_before_anything_starts(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load(["scenario=topics", f"scenario.items={tmp_path / name}", "scenario.opening=null"])
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "a", "topic": "x"}\n')
    assert list(items.read(str(tmp_path / "marked.jsonl"))) == [{"id": "a", "topic": "x"}]
