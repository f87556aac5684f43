"""PEFT's CorDA takes the exported covariances in place of a run of its own, and the logits stay."""

import sys
from pathlib import Path

from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda

sys.path.insert(0, sys.argv[2])
from nets import examples, net


def main() -> None:
    inputs, _ = examples()
    for method in ("ipm", "kpm"):
        model = net()
        before = model(inputs).detach()
        config = LoraConfig(
            r=4,
            lora_alpha=4,
            init_lora_weights="corda",
            target_modules=["0", "2"],
            corda_config=CordaConfig(covariance_file=str(Path(sys.argv[1]) / "corda"), corda_method=method),
        )
        preprocess_corda(model, config, run_model=None)
        adapted = get_peft_model(model, config)
        worst = float((adapted(inputs).detach() - before).abs().max() / before.abs().max())
        print(f"  {method}: logits differ by {worst:.2g} of the largest")
        assert worst <= 1e-6
        assert any("lora_A" in name and float(each.abs().max()) > 0 for name, each in adapted.named_parameters())


main()
