"""transformers' DeepseekV4ForCausalLM with the nano configuration; works with transformers 5.17 and 5.24."""
import numpy as np
import torch

import checkpoint

NOT_FOR_TRANSFORMERS = ("quantization_config", "expert_dtype", "torch_dtype", "architectures", "transformers_version", "topk_method",
                        "model_type", "rope_scaling")


def configuration(raw):
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    plain = {k: v for k, v in raw.items() if k not in NOT_FOR_TRANSFORMERS}
    part = raw["qk_rope_head_dim"] / raw["head_dim"]
    scaling = raw["rope_scaling"]
    nested = {"main": {"rope_type": "default", "rope_theta": float(raw["rope_theta"]), "partial_rotary_factor": part},
              "compress": {"rope_type": "yarn", "rope_theta": float(raw["compress_rope_theta"]), "partial_rotary_factor": part,
                           "factor": float(scaling["factor"]), "beta_fast": float(scaling["beta_fast"]), "beta_slow": float(scaling["beta_slow"]),
                           "original_max_position_embeddings": scaling["original_max_position_embeddings"], "attention_factor": 1.0}}
    try:
        config = DeepseekV4Config(**plain, rope_parameters=nested)
    except Exception as error:                       # an older or newer reader: the flat form of config.json
        print("nested rope parameters refused:", repr(error), flush=True)
        config = DeepseekV4Config(**plain, rope_scaling=dict(scaling))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def build(raw, device):
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
    model = DeepseekV4ForCausalLM(configuration(raw)).float().to(device)
    set_rotary(model, raw)
    expected, found = checkpoint.shapes(raw), {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if expected != found:
        raise SystemExit(f"the model's tensors are not the planned ones: {sorted(set(expected.items()) ^ set(found.items()))[:12]}")
    return model


def set_rotary(model, raw):
    """Makes the rotary tables the specified ones, whatever the library computed; reports the difference."""
    plain, compressed = checkpoint.rotary_frequencies(raw)
    worst = 0.0
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ != "DeepseekV4RotaryEmbedding": continue
            for name, table in (("main", plain), ("compress", compressed)):
                target = getattr(module, name + "_inv_freq")
                wanted = torch.from_numpy(table).to(target)
                if target.shape != wanted.shape: raise SystemExit(f"rotary table {name}: {tuple(target.shape)} instead of {tuple(wanted.shape)}")
                worst = max(worst, float(((target - wanted).abs() / wanted).max()))
                target.copy_(wanted); setattr(module, name + "_attention_scaling", 1.0)
    print(f"rotary tables: largest relative difference to the library's {worst:.2e}", flush=True)


def state_of(model):
    return {n: t.detach().float().cpu().numpy() if t.is_floating_point() else t.detach().cpu().numpy() for n, t in model.state_dict().items()}


def released(directory, raw, device):
    """A fresh, unpatched model that holds the released weights, dequantized exactly."""
    model = build(raw, device)
    own, given = model.state_dict(), checkpoint.transformers_state(checkpoint.load(directory), raw)
    if set(own) != set(given): raise SystemExit(f"the release and the model differ in {set(own) ^ set(given)}")
    model.load_state_dict({n: torch.from_numpy(np.array(w)).to(own[n]) for n, w in given.items()}, strict=True)
    return model.eval()
