"""Writes docs/memory.md: `PYTHONPATH=. python docs/make_memory_page.py`. A test says when it is out of date."""

from pathlib import Path

from conveyor.cluster_check import check_on
from conveyor.config import load_recipe
from conveyor.plan.layout import parse_cluster

PAGE = Path(__file__).with_name("memory.md")
RECIPES = PAGE.parents[1] / "recipes"
CLUSTERS = {
    "llama3_8b_grpo_lora_1gpu": "1x1",
    "llama3_8b_grpo_8gpu": "1x8",
    "llama3_8b_ppo_8gpu": "1x8",
    "qwen3_30b_a3b_grpo_8gpu": "1x8",
    "llama3_70b_ppo_32gpu": "4x8",
    "llama3_70b_ppo_128gpu": "16x8",
}
"""Recipe for GPUs → the cluster it is made for."""
HEAD = """# Where the memory goes

What `conveyor check RECIPE --cluster NODESxGPUS` prints of each recipe for GPUs, on GPUs of 80 GiB. These are the planner's numbers, from
the shapes of the models and from what DeepSpeed is seen to keep on CPUs; none has been compared with a GPU yet. Another cluster is one
command away: `--cluster 2x8:141` are two nodes of eight GPUs with 141 GiB. What does not fit ends with one line that says what would, exit
status 2.

* **reserved**: CUDA context, communication buffers, fragmentation; 1 GB more for every further process on the GPU.
* **engine weights, KV cache**: an engine's share of the policy; the cache of its running samples, split by key/value heads.
* **trained weights, gradients, optimizer**: of the actor, and a critic beside it, 2 + 4 + 12 bytes a parameter in bfloat16: weights,
  gradients summed in fp32, the fp32 copy with Adam's two moments. ZeRO 1 shares out the last, 2 the gradients too, 3 all of it; below
  ZeRO 2 there are 2 bytes more.
* **gathered layers**: what ZeRO-3 has put together at a time: a billion parameters, or the largest matrix with two layers.
* **reduced at a time**: the bucket of gradients on their way between ranks: as large as the largest matrix, in both precisions.
* **train activations**: each layer's input and one layer's whole set, for `train.max_tokens_per_micro_batch` tokens; a chunk of logits.
* **host memory**: states that are offloaded, 12 bytes a parameter, and 8 for two gradients.

A base in 4 bits (`lora.quantization: nf4`) takes 4.127 bits a weight of a linear layer. A mixture of experts is kept whole and computed in
part. Stages that take turns on a group (`pipeline.sleep`) are not added up: the largest counts, the others wait in host memory.

This page is made by `docs/make_memory_page.py`.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for name, cluster in CLUSTERS.items():
        recipe = load_recipe(RECIPES / f"{name}.yaml")
        parts.append(f"## recipes/{name}.yaml, {cluster}\n\n```\n{check_on(recipe, parse_cluster(cluster))}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
