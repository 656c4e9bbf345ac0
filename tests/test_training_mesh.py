"""Several devices: the same step as on one, noise without communication, and a ledger that loses nothing.

Devices are simulated, in processes of their own (`mesh_runs.py`).
"""

import json
import signal

import jax
import jax.numpy as jnp
import mesh_runs
import numpy as np
import optax
import pytest
from helpers import refusal
from jax.sharding import PartitionSpec as P
from training_runs import linear, plan_of, still_trainer

from jaxacct.training import Ledger, Trainer
from jaxacct.training.sharding.placement import Processes


def one_device():
    return jax.make_mesh((1,), ("x",))


@pytest.fixture(scope="module")
def four_devices(tmp_path_factory):
    """What one process with four devices tells of noise and of kept steps."""
    folder = tmp_path_factory.mktemp("programs")
    return [json.loads(line) for line in mesh_runs.done(mesh_runs.begin("noise kept", folder, 4))[0].splitlines()]


def test_noise_is_the_same_wherever_it_is_drawn_and_nothing_crosses_devices(four_devices):
    for crossing, scratch, alone, off in four_devices[0]:
        assert crossing == [] and off <= 1e-6
        assert (
            scratch <= 0.45 and alone <= 0.25
        )  # one device adds noise in place; four have a quarter of the draws each


def test_a_mesh_of_one_device_trains():
    """Steps on a mesh have keys of their own, even on one device; the claim is the plan's."""
    plan, data = plan_of(5, 0.5, steps=3), np.eye(5, dtype=np.float32)
    trainer = Trainer(linear, optax.sgd(1.0), plan, 1.0, mesh=one_device())
    state = trainer.fit(trainer.init(np.zeros(5, np.float32)), data, progress=False)
    assert state.step == 3 and float(state.epsilon.upper) == float(plan.epsilon.upper)
    assert "1 x" in trainer._repr_html_() and "data" in trainer._repr_html_()
    chains = set()
    for more in ({"mesh": one_device()}, {}, {}):  # without a mesh: the same chain twice
        trainer = still_trainer(plan, **more)
        state = trainer.fit(trainer.init(np.zeros(5, np.float32), bytes(32)), data, progress=False)
        chains.add(state.lineage.chain)
    assert len(chains) == 2


def test_a_kept_step_goes_to_devices_in_the_order_of_their_mesh(four_devices):
    compiled, loaded = four_devices[1]
    assert compiled[0] == loaded[0] and [compiled[1:], loaded[1:]] == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"mesh": 4}, "mesh = 4 must be a jax.sharding.Mesh; use jax.make_mesh"),
        ({"shard": "fsdp"}, "shard = 'fsdp' needs a mesh; give one"),
        ({"mesh": one_device, "shard": "rows"}, "must be 'data', 'fsdp' or a pytree of PartitionSpecs"),
        ({"mesh": one_device, "shard": {"w": 3}}, "must be 'data', 'fsdp' or a pytree of PartitionSpecs"),
        ({"mesh": one_device, "shard": {"w": P("y")}}, "shard names the axis 'y', must be one of the mesh's: ('x',)"),
        ({"mesh": one_device, "shard": {"w": P(("x", "x"))}}, "P(('x', 'x'),), must name an axis once at most"),
        ({"mesh": one_device, "shard": {"w": P(P.UNCONSTRAINED)}}, "P(UNCONSTRAINED,), must name an axis once"),
        ({"mesh": one_device, "shard": {"w": P(unreduced={"x"})}}, "unreduced={'x'}), must name an axis once"),
    ],
)
def test_what_is_no_mesh_is_refused(more, text):
    more = {name: value() if callable(value) else value for name, value in more.items()}
    assert text in refusal(Trainer, linear, optax.sgd(1.0), plan_of(5), 1.0, **more)


def test_specs_that_do_not_fit_the_parameters_are_refused():
    make = lambda shard: Trainer(linear, optax.sgd(1.0), plan_of(5), 1.0, mesh=one_device(), shard=shard)
    assert "shard must be a prefix of the parameters" in refusal(make({"b": P()}).init, {"w": jnp.zeros(3)})
    assert "has shape (3,), must be cut evenly by" in refusal(make({"w": P(None, "x")}).init, {"w": jnp.zeros(3)})


def test_messages_between_processes(monkeypatch):
    """A message may have any length; what process 0 refuses is refused by all processes."""
    from jax.experimental import multihost_utils

    sent = {0: b"", 1: b"x" * 700}
    whole = lambda number: len(sent[number]).to_bytes(8, "little") + sent[number]
    rounds = []

    def together(own):
        room = own.size
        part = [whole(n)[:256] if not rounds else whole(n)[256:] for n in range(2)]
        rounds.append(room)
        assert bytes(own) == part[1].ljust(room, b"\0")
        return np.array([np.frombuffer(each.ljust(room, b"\0"), np.uint8) for each in part])

    monkeypatch.setattr(multihost_utils, "process_allgather", together)
    second = Processes(2, 1)
    assert second.gather(sent[1]) == [b"", sent[1]] and rounds == [256, 512]
    for told, kind in ((b"Rno room", "InputError"), (b"FOSError: disk", "RuntimeError")):
        monkeypatch.setattr(Processes, "gather", lambda self, own, told=told: [told, own])
        with pytest.raises(Exception, match=told[1:].decode()) as caught:
            second.decide(lambda: b"is not asked")
        assert type(caught.value).__name__ == kind
    assert "plan of process 1 differs from that of process 0" in refusal(second.agree, "plan", b"mine")
    monkeypatch.setattr(Processes, "gather", lambda self, own: [b"\1\0", own])
    assert second.any(False, False) == (True, False)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Steps of one key on meshes of 1, 2 and 4 devices, on two processes of two, and without a mesh."""
    folder = tmp_path_factory.mktemp("steps")
    for devices in (0, 1, 2, 4):
        mesh_runs.done(mesh_runs.begin("steps", folder, devices))
    address = mesh_runs.address()
    mesh_runs.done(*(mesh_runs.begin("steps", folder, 2, address, number) for number in range(2)))
    return {name: np.load(folder / f"{name}.npz") for name in ("none", "1", "2", "4", "2x2")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "2", "4", "2x2"])
def test_meshes_draw_the_same_examples_and_come_to_the_same_sums(steps, name):
    """The numbers of members agree exactly; equal sums of losses and gradients show that the members are the same."""
    one, other = steps["1"], steps[name]
    counted = 0
    for key in other.files:
        if key.startswith("noise"):
            continue
        a, b = np.asarray(one[key], np.float64), np.asarray(other[key], np.float64)
        if "members" in key or "not_finite" in key or key.endswith(".clipped"):
            assert a == b, key
            counted += 1
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a), key
    assert counted >= 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2", "4", "2x2"])
def test_meshes_add_the_same_noise(steps, name):
    """The deviation is 1: noise multiplier 2, clip norm .5.  Banded noise adds the past noise in its buffers."""
    one, other = steps["1"], steps[name]
    noisy = [key for key in one.files if key.startswith("noise") and "observed" not in key]
    assert len(noisy) == 20
    for key in noisy:
        assert np.abs(one[key] - other[key]).max() <= 1e-6, key
    drawn = np.concatenate([one[key].reshape(-1) for key in noisy if "fsdp" in key and "clip_norm" not in key])
    assert abs(drawn.std() - 1) < 0.03 and abs(drawn.mean()) < 0.05


def killed(folder, victim):
    """Kill a run of one process, or process `victim` of a run of two; return how many steps were seen."""
    address = mesh_runs.address()
    more = [()] if victim is None else [(address, number) for number in range(2)]
    running = [mesh_runs.begin("run", folder, 4 if victim is None else 2, *each) for each in more]
    seen = 0
    for line in running[0].stdout:
        seen = max(seen, int(line)) if line.strip().isdigit() else seen
        if (seen % 3 == 1 and seen > 3) or seen == 2:
            running[victim or 0].send_signal(signal.SIGKILL)
            break
    for process in running:
        if victim is not None and process is not running[victim]:
            process.kill()  # it waits for the killed process, in vain
        process.communicate()
    return seen


def everywhere(command, folder, processes):
    """What is printed by one process with four devices, or by two with two each."""
    address = mesh_runs.address()
    more = [(address, number) for number in range(2)] if processes == 2 else [()]
    return mesh_runs.done(*(mesh_runs.begin(command, folder, 4 // processes, *each) for each in more))


def whole_run(folder, processes):
    folder.mkdir(exist_ok=True)
    told = everywhere("run", folder, processes)
    return [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in told]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "source"])
@pytest.mark.parametrize("victims", [[None, None], [0, 1], [1, 0]])
def test_a_run_that_is_killed_loses_no_entry(tmp_path, victims, kind):
    """Repeated steps come out the same, to the last bit, and count once."""
    processes = 1 if victims[0] is None else 2
    folder = tmp_path / kind
    folder.mkdir()
    for victim in victims:
        seen = killed(folder, victim)
        assert sum(Ledger.read(folder / "run.jsonl").releases().values()) >= seen >= 2
    ended = whole_run(folder, processes)
    assert ended == ended[:1] * processes
    if kind == "run":  # the draws of a source are new in every `fit` that is no continuation
        assert ended == whole_run(tmp_path / "peace", processes)
    assert ended[0]["step"] == mesh_runs.STEPS and ended[0]["stopped"] == "finished"
    assert sum(Ledger.read(folder / "run.jsonl").releases().values()) == mesh_runs.STEPS


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    told, spent = json.loads(mesh_runs.done(mesh_runs.begin("move", tmp_path, 4))[0])
    assert told == [[1, 4, 4], [5, 8, 2], [9, 12, 1]] and spent == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "what", "processes", "least"),
    [
        ("one_audit", "as it is", 1, 0.9),
        ("one_audit", "as it is", 2, 0.9),
        ("audit", "truncated_poisson", 1, 0.8),  # 0.8 is the least share without a mesh, too
        ("audit", "users", 1, 0.8),
        ("audit", "poisson", 2, 0.8),
    ],
)
def test_the_step_leaks_what_is_claimed_and_no_more(command, what, processes, least):
    for output in everywhere(command, what, processes):
        epsilon, claimed = json.loads(output.splitlines()[-1])
        assert least * claimed <= epsilon <= claimed


@pytest.mark.slow
def test_less_noise_on_a_mesh_is_caught():
    epsilon, claimed = json.loads(everywhere("one_audit", "less noise", 1)[0])
    assert epsilon > claimed
