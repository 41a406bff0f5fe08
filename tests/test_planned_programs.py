"""What a recipe's programs are, by its algorithm."""

import jax
import pytest
from test_planning import config, mesh_of, tiny  # noqa: F401 (a fixture)

from psearch_jax.planned_programs import programs
from psearch_jax.planned_recipe import lay_out_abstract, matmul_parameters


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_is_planned_with_its_memory(tiny, critic):  # noqa: F811
    """A separate one is a second trunk with a head, an optimiser and an update of its own; a shared one a head."""
    settings = config(
        tiny, "algorithm.advantage=gae", f"algorithm.critic={critic}", "algorithm.kl_place=reward"
    )
    plain = lay_out_abstract(config(tiny), mesh_of(4))
    recipe = lay_out_abstract(settings, mesh_of(4))
    found = {program.name: program for program in programs(recipe)}
    head = 4 * (256 // 4 + 1)
    trained = plain.resident.parameters
    if critic == "shared":
        assert recipe.resident.critic == 0 and "critic" not in found
        assert 0 <= recipe.resident.parameters - trained <= 4 * head
    else:
        assert recipe.resident.parameters == trained
        assert 0 < recipe.resident.critic - 3 * trained < 20 * head
        assert "critic" in found["update"].beside and "optimizer" in found["critic"].beside
    assert matmul_parameters(recipe) == matmul_parameters(plain)
    assert recipe.resident.reference == trained and "reference" in found["update"].beside
    for name in {"update", "critic"} & set(found):
        program = found[name]
        shapes = jax.eval_shape(program.function, *program.arguments, **program.options)
        assert shapes[1]["loss"].shape == ()
