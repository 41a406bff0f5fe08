"""Slots from free memory: as many as fit, no more than are of use, and never silently fewer than asked for."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from rollout import toys

from psearch_jax.config import MeshConfig
from psearch_jax.errors import UserError
from psearch_jax.mesh import NOWHERE, Layout, make_mesh
from psearch_jax.rollout import sizing
from psearch_jax.rollout.sizing import choose_slots, free_bytes, slot_bytes

DECODER, _, _ = toys.make_policy(toys.make_tokenizer("whole"), [])
#: Two layers, two heads of 8, float32, keys and values; a layer of it again; two hidden states; logits three times.
SLOT = 2 * 2 * 2 * 8 * 96 * 4 * 3 // 2 + 2 * 4 * DECODER.hidden_size + 12 * DECODER.vocab_size


@pytest.fixture
def memory(monkeypatch):
    """Makes so many slots of the toy model fit, and no more."""

    def set_to(slots: float) -> None:
        free = int(slots * SLOT / sizing.SHARE) + 1
        monkeypatch.setattr(sizing, "free_bytes", lambda device: free)

    return set_to


def choose(slots=0, *, layout=NOWHERE, episodes=100, **more):
    rollout = replace(toys.ROLLOUT, slots=slots)
    return choose_slots(rollout, DECODER, layout, episodes=episodes, **more)


def test_a_slot_in_bytes():
    assert slot_bytes(DECODER, 96, NOWHERE, "float32") == SLOT


def test_zero_takes_what_fits_but_no_more_than_is_of_use(memory):
    memory(37.5)
    rollout, told = choose()
    assert (rollout.slots, told.slots, told.fitting) == (37, 37, 37)
    assert str(told).startswith("37 rollout slots of 0.04 MiB; 37 fit into 90% of the 0.00 GiB")
    assert choose(episodes=10)[0].slots == 10
    assert choose(reserved=20 * SLOT)[0].slots < 20


def test_asking_for_more_than_fits_names_the_number_that_does(memory):
    memory(37.5)
    assert choose(37)[0].slots == 37
    with pytest.raises(
        UserError, match=r"rollout\.slots=38 .* room for 37; set rollout\.slots to 37"
    ):
        choose(38)
    memory(0.5)
    with pytest.raises(UserError, match=r"room for 0; lower rollout\.context"):
        choose()


def test_a_mesh_holds_a_multiple_of_its_pieces_and_a_cpu_is_shared(memory):
    layout = Layout(make_mesh(MeshConfig(data=8)), "rollout")
    memory(83)  # of the host: each of its eight devices has room for ten
    assert choose(layout=layout)[0].slots == 80
    assert choose(layout=layout, episodes=9)[0].slots == 16


def test_free_memory_is_the_devices_own_or_the_hosts():
    device = SimpleNamespace(
        platform="gpu", memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30}
    )
    assert free_bytes(device) == 70
    assert free_bytes(jax.devices()[0]) > 2**20
