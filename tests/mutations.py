# ruff: noqa: E501 - each piece of code stands in one line
"""Each rule's behaviour, taken out: does the test that RULES.md names for it fail then?

    python tests/mutations.py [RULE ...]

Prints a row for each rule: its test, what was taken out, and how the test failed. Exits with 1 if one did not.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\| ([A-F]\d+) \| .+ \| `(.+)` \| `(.+)::(.+)` \|$", (ROOT / "RULES.md").read_text("utf-8"), re.M)
STEP = "    def on_train_epoch_end(self) -> None:\n        self.log_epoch(self.train_metrics)\n"

# Rule -> file, a place in it, what takes that place, and in words what is gone then.
TAKEN_OUT: dict[str, tuple[str, str, str, str]] = {
    "A1": ("order.py", '"seed": options["seed"], "drop_last"', '"seed": torch.seed() % 2**31, "drop_last"', "seeded order"),
    "A2": ("facts.py", '        "cuda_version": torch.version.cuda or "none",\n', "", "the version of CUDA"),
    "A3": ("task.py", '"balance", "fingerprint"):', '"balance"):', "the hash of the data"),
    "A4": ("recipe.yaml", "deterministic: true", "deterministic: false", "deterministic algorithms"),
    "B1": ("loader.py", "if self.trainer and self.trainer.training:", "if self.trainer:", "augmentation in training alone"),
    "B2": ("loader.py", "pin_memory=cuda,", "pin_memory=False,", "pinned memory"),
    "B3": ("loader.py", ' // int(os.environ.get("LOCAL_WORLD_SIZE", 1))', "", "the share of the cores"),
    "B4": ("check.py", "if not torch.isfinite(inputs.float()).all():", "if False:", "the look for NaN"),
    "B5": ("loader.py", 'drop_last=name == "train",', "drop_last=False,", "drop_last"),
    "C1": ("task.py", STEP, f"    def on_validation_start(self) -> None:\n        self.train()\n\n{STEP}", "eval mode"),
    "C2": (
        "task.py",
        STEP,
        f"    def optimizer_zero_grad(self, *_: Any) -> None:\n        self.zero_grad(set_to_none=False)\n\n{STEP}",
        "set_to_none",
    ),
    "C3": ("recipe.yaml", "gradient_clip_val: 1.0", "gradient_clip_val: null", "clipping"),
    "C4": ("recipe.yaml", "precision: 16-mixed", "precision: 32-true", "mixed precision"),
    "C5": ("recipe.yaml", "mode: min\n  filename: best", "mode: max\n  filename: best", "lowest is best"),
    "C6": ("task.py", "        self.measure(self.val_metrics, self(batch[0]), batch[1])\n", "        pass\n", "measuring validation"),
    "C7": ("cli.py", "theirs.EarlyStopping: fitting,", "theirs.EarlyStopping: False,", "early stopping"),
    "C8": ("optim.py", "    if step < warmup_steps:\n        return warmup(step, total_steps, fraction)\n", "", "warm-up"),
    "C9": ("task.py", "        return loss\n\n    def validation_step", "        return loss * self.trainer.accumulate_grad_batches\n\n    def validation_step", "the division of the loss"),
    "C10": ("metrics.py", "value=loss.expand(len(targets))", "value=loss", "weighting by samples"),
    "C11": ("optim.py", '"interval": "step"}]', '"interval": "epoch"}]', "its step at each optimizer step"),
    "C12": ("task.py", "        if not torch.isfinite(loss):", "        if False:", "the look at the loss"),
    "C13": ("loader.py", '            seed_batch(self.trainer, self.hparams["seed"])\n', "", "seeding each batch"),
    "C14": ("task.py", "self.network.compile()", "self.network = torch.compile(self.network)", "compiling in place"),
    "D1": ("backbones.py", "            network.load_state_dict(weights.get_state_dict(check_hash=True, weights_only=True))\n", "            pass\n", "loading the weights"),
    "D2": ("optim.py", '            factor = options["backbone_lr_factor"]', '            factor = 1 or options["backbone_lr_factor"]', "rates by depth"),
    "D3": ("task.py", "F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weight)", "F.cross_entropy(logits.float(), targets, weight)", "the loss of several labels"),
    "D4": ("speed.py", "if share < 0.1 else", "if share <= 1 else", "the verdict on the loader"),
    "E1": ("task.py", STEP, f"    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:\n        checkpoint['network'] = self.network\n\n{STEP}", "state_dict alone: a pickled network beside it"),
    "E2": ("checkpoints.py", 'map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False', "weights_only"),
    "E3": ("export.py", "torch.float32).eval().requires_grad_(False)", "torch.float32).train().requires_grad_(False)", "eval mode in the export"),
    "E4": ("parity.py", "if not np.allclose(logits, expected, **tolerance, equal_nan=False):", "if False:", "the comparison"),
    "F1": ("registry.py", "self.model_name, tags=tags)", "self.model_name)", "what the version is tied to"),
    "F2": ("export.py", '"shape": ["batch", *spec["shape"]]', '"shape": spec["shape"]', "the free batch size"),
    "F3": ("export.py", "    for size in batch_sizes:\n", "    for size in batch_sizes[:1]:\n", "the other batch sizes"),
    "F4": ("speed.py", "cheapest = min(rows)", "cheapest = max(rows)", "the cheapest way"),
}  # fmt: skip


def main() -> int:
    from cookiecutter.main import cookiecutter

    chosen, survivors = sys.argv[1:], []
    with tempfile.TemporaryDirectory() as name:
        clean = Path(cookiecutter(str(ROOT), no_input=True, default_config=True, output_dir=name))
        for rule, _, tests, test in ROWS:
            if chosen and rule not in chosen:
                continue
            file, old, new, words = TAKEN_OUT[rule]
            project = Path(shutil.copytree(clean, Path(name) / rule))
            path = project / file if file == "recipe.yaml" else project / "my_lightning_project" / file
            path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "--tb=line",
                f"tests/{tests}",
                "-k",
            ]
            result = subprocess.run([*command, test], cwd=project, capture_output=True, text=True)
            failures = re.findall(r"^E? *((?:/|\w+Error|Failed|assert).*)$", result.stdout, re.M)
            if result.returncode != 1:
                survivors.append(rule)
            reason = re.sub(r"^/\S+ ", "", failures[0])[:110] if failures else result.stdout.splitlines()[-1]
            print(f"| {rule} | `{tests}::{test}` | {words} | {reason.replace('|', '/')} |", flush=True)
            shutil.rmtree(project)
    print(f"not caught: {', '.join(survivors) or 'none'}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
