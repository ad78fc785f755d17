"""LoRA by PEFT under a byte limit: few parameters train, activations are saved all the same.

python examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fxrecals

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    use_cache=False,
)
adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1)
model = get_peft_model(LlamaForCausalLM(config), adapters).train()
model.print_trainable_parameters()

ids = torch.randint(64, (4, 64))
example = {"input_ids": ids, "labels": ids}
plan = fxrecals.plan(model, example, limit="50%")
print(str(plan).splitlines()[0])


def step(module: torch.nn.Module) -> list[torch.Tensor]:
    """The loss and the gradients of the adapters, after a step from the same seed."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = module(**example).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


small = fxrecals.rewrite(model, example, plan)
plain, under_the_limit = step(model), step(small)
print("same bits:", all(map(torch.equal, plain, under_the_limit)))
watch = fxrecals.monitor(small, warmup=0)
with watch:
    step(small)
print("measured within the plan:", watch.steps[0].measured_bytes <= plan.step_peak_bytes)
