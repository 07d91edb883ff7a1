"""Accuracy of a checkpoint on held-out prompts, without training it."""

from ebbtide.loop.evaluate import Evaluation, evaluate
from ebbtide.loop.parts import build_data, build_engine, build_rollout, sampling_params
from ebbtide.recipe import Recipe
from ebbtide.rewards.scoring import Rewards
from ebbtide.weightsync.inprocess import InProcessTransport
from ebbtide.weightsync.push import push

__all__ = ["examine"]


async def examine(recipe: Recipe) -> Evaluation:
    """Answer the recipe's held-out prompts with the weights of its [model], as its [eval] says.

    Raises:
        EbbtideError: of the kind that says what is wrong.
    """
    data = build_data(recipe)
    with Rewards(recipe.rewards) as rewards:
        rollout, transport = build_rollout(recipe, data), InProcessTransport()
        engine = build_engine(recipe, data.device, recipe.model, recipe.steps)
        try:
            await push(engine.named_weights(), transport, rollout, 0)
            return await evaluate(
                rollout,
                data.held_out,
                sampling_params(recipe, temperature=recipe.eval.temperature),
                rewards,
                data.decode,
                correct_at=recipe.eval.correct_at,
                seed=recipe.seed + 1,
            )
        finally:
            await rollout.close()
            await transport.close()
            engine.close()
