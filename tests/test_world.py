import re

import numpy as np
import pytest

from omniload.errors import ConfigError
from omniload.world import World


@pytest.fixture
def env(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_is_the_default(env):
    world = World.from_env()
    assert (world.dp_rank, world.dp_world_size, world.rank, world.world_size) == (0, 1, 0, 1)


def test_torchrun_variables_are_read(env):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        env.setenv(name, value)
    env.setenv("GROUP_RANK", "2")
    world = World.from_env()
    assert (world.dp_rank, world.dp_world_size, world.local_rank, world.node_rank) == (5, 8, 1, 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "must be set together"),
        ({"RANK": "", "WORLD_SIZE": "4"}, "must be set together: got RANK='', WORLD_SIZE='4'"),
        ({"RANK": "3", "WORLD_SIZE": ""}, "must be set together"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "got 2 of 2"),
    ],
)
def test_wrong_variables_are_named(env, variables, message):
    for name, value in variables.items():
        env.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        World.from_env()


def test_empty_variables_count_as_unset(env):
    env.setenv("RANK", "")
    env.setenv("WORLD_SIZE", "")
    assert World.from_env().dp_world_size == 1


@pytest.mark.parametrize("name", sorted(World.__dataclass_fields__))
@pytest.mark.parametrize("value", [True, "1", 1.0, [0]])
def test_a_fact_that_is_no_integer_is_shown(name, value):
    with pytest.raises(
        ConfigError, match=re.escape(f"World.{name} must be an integer, got {value!r}")
    ):
        World(**{name: value})


def test_numpy_integers_become_python_integers():
    world = World(dp_rank=np.int64(1), dp_world_size=np.int32(2))
    assert type(world.dp_rank) is type(world.dp_world_size) is type(world.rank) is int
    assert world == World(dp_rank=1, dp_world_size=2)


def test_a_rank_that_is_not_below_its_size_shows_both():
    with pytest.raises(ConfigError, match=r"World.dp_rank .* World.dp_world_size: got 2 of 2"):
        World(dp_rank=2, dp_world_size=2)


def test_replicas_share_a_data_parallel_rank():
    world = World(dp_rank=1, dp_world_size=2, replica_rank=3, replica_size=4)
    assert (world.rank, world.world_size) == (7, 8)


class FakeMesh:
    """The three members of DeviceMesh that are read, for the process at `place`."""

    def __init__(self, names, shape, place):
        self.mesh_dim_names = names
        self.mesh = np.zeros(shape)
        self._place = place

    def get_coordinate(self):
        return self._place


def test_mesh_coordinates_are_split_into_data_and_replicas(env):
    mesh = FakeMesh(("replicate", "pp", "shard", "tp"), (2, 3, 4, 5), [1, 2, 3, 4])
    world = World.from_mesh(mesh, ("replicate", "shard"))
    assert (world.dp_rank, world.dp_world_size) == (1 * 4 + 3, 8)
    assert (world.replica_rank, world.replica_size) == (2 * 5 + 4, 15)


def test_mesh_without_the_dimension_is_refused(env):
    with pytest.raises(ConfigError, match="must name dimensions of the mesh"):
        World.from_mesh(FakeMesh(("dp",), (2,), [0]), "data")
    with pytest.raises(ConfigError, match="not part of the mesh"):
        World.from_mesh(FakeMesh(("dp",), (2,), None), "dp")
