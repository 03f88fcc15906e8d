"""Trains an embedded model: `python -m mmlens.toys.train toy-qwen3-vl --out DIR` (seeded, checkpointed, resumable)."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mmlens.tasks.scenes import CELL, COLORS, GRID, KINDS, Domain, Layout, draw_layout, draw_masks, paint
from mmlens.toys.build import ID, MERGE, PATCH, SYSTEM, build_model, build_processor
from mmlens.toys.card import write_card

N_TOKENS = (GRID * CELL // PATCH // MERGE) ** 2
QUESTION = [
    "<|im_start|>",
    "user",
    "\n",
    "what",
    "color",
    "is",
    "the",
    "{}",
    "?",
    "<|im_end|>",
    "\n",
    "<|im_start|>",
    "assistant",
    "\n",
]
ANSWER_AT = len(QUESTION)  # index of the answer inside one turn
TURN = ANSWER_AT + 3  # question, answer, end mark, newline


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome; the model card prints it.

    Three phases: (1) the tower and projector learn to see, through a per-token classifier of kind and colour that is
    dropped at the end; (2) "star red" pairs teach the retrieval; (3) natural questions through the chat template. The
    classifier keeps a small share of the loss in (2) and (3), so the tower goes on improving.

    `head_sparsity` is a group lasso on each head's output weights: after every step of (2) and (3) the norm of each
    head's block of W_O shrinks by learning rate x head_sparsity. Without it all twelve heads of the first layer learn
    the same retrieval, and cutting five of them costs nothing.
    """

    seed: int = 0
    warmup_steps: int = 1000
    short_steps: int = 800
    steps: int = 2300  # (2) and (3) together
    batch: int = 24
    warmup_batch: int = 16
    warmup_objects: int = 12
    learning_rate: float = 1.5e-3
    warmup_learning_rate: float = 3e-3
    weight_decay: float = 0.01
    auxiliary_weight: float = 0.1
    head_sparsity: float = 2.0
    short_share: float = 0.25  # of the steps of (3) still in short form
    system_share: float = 0.125  # of the natural sequences that open with a system turn
    warmup_digits_share: float = 0.75
    digits_share: float = 0.6


def augment(masks: Float[Tensor, "n 32 32"], generator: torch.Generator) -> Float[Tensor, "n 32 32"]:
    """Small random rotations (5 degrees), stretches (5 %), slants and shifts (under a pixel) of handwriting."""
    n = len(masks)
    draw = lambda scale: (torch.rand(n, generator=generator) * 2 - 1) * scale  # noqa: E731
    angle, stretch_x, stretch_y, shear = draw(0.09), 1 + draw(0.05), 1 + draw(0.05), draw(0.06)
    cos, sin = angle.cos(), angle.sin()
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1], theta[:, 0, 2] = cos * stretch_x, -sin + shear, draw(0.05)
    theta[:, 1, 0], theta[:, 1, 1], theta[:, 1, 2] = sin, cos * stretch_y, draw(0.05)
    grid = F.affine_grid(theta, [n, 1, CELL, CELL], align_corners=False)
    return F.grid_sample(masks[:, None], grid, align_corners=False)[:, 0]


class Scenes:
    """Random training batches: pictures as the processor would make them, and what stands in each cell."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 2])
        self.generator = torch.Generator().manual_seed(seed)

    def state(self) -> dict:
        """What `restore` needs to go on with the same draws."""
        return {"numpy": self.rng.bit_generator.state, "torch": self.generator.get_state()}

    def restore(self, state: dict) -> None:
        """Go on from a `state`."""
        self.rng.bit_generator.state = state["numpy"]
        self.generator.set_state(state["torch"])

    def draw(
        self, domain: Domain, n: int, n_objects: int, *, repeats: bool = False
    ) -> tuple[Layout, Float[Tensor, "patch 384"]]:
        """A batch of layouts and their `pixel_values`; with `repeats` a kind may stand several times."""
        layout = draw_layout(self.rng, domain, n, min(n_objects, len(KINDS[domain])))
        if repeats:
            size = (n, n_objects)
            cells = self.rng.permuted(np.tile(np.arange(GRID * GRID), (n, 1)), axis=1)[:, :n_objects]
            kinds = self.rng.integers(0, len(KINDS[domain]), size)
            layout = Layout(kinds, self.rng.integers(0, len(COLORS), size), cells)
        masks = draw_masks(self.rng, domain, layout.kinds, "train")
        if domain == "digits":
            flat = augment(torch.from_numpy(masks).flatten(0, 1), self.generator)
            masks = flat.numpy().reshape(masks.shape)
        pictures = torch.from_numpy(paint(self.rng, domain, layout, masks)).permute(0, 3, 1, 2)
        return layout, patchify((pictures / 255 - 0.5) / 0.5)


def patchify(pictures: Float[Tensor, "n 3 side side"]) -> Float[Tensor, "patch 384"]:
    """Flattened patches in 2 x 2 block order, each frame twice: what Qwen's picture processor returns."""
    n, _, side, _ = pictures.shape
    m = side // PATCH // MERGE
    x = pictures.reshape(n, 3, m, MERGE, PATCH, m, MERGE, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return x.unsqueeze(6).expand(*x.shape[:6], 2, PATCH, PATCH).reshape(-1, 3 * 2 * PATCH * PATCH)


def token_labels(domain: Domain, layout: Layout) -> tuple[Int[Tensor, "n token"], Int[Tensor, "n token"]]:
    """Kind and colour seen by every picture token; the last class of each is 'nothing'."""
    n = len(layout.kinds)
    offset = 0 if domain == "shapes" else len(KINDS["shapes"])
    kinds = torch.full((n, GRID * GRID), len(KINDS["shapes"]) + len(KINDS["digits"]))
    colors = torch.full((n, GRID * GRID), len(COLORS))
    kinds.scatter_(1, torch.from_numpy(layout.cells), torch.from_numpy(layout.kinds) + offset)
    colors.scatter_(1, torch.from_numpy(layout.cells), torch.from_numpy(layout.colors))
    per_cell = CELL // PATCH // MERGE
    grow = lambda x: (  # noqa: E731
        x.view(n, GRID, 1, GRID, 1).expand(n, GRID, per_cell, GRID, per_cell).reshape(n, -1)
    )
    return grow(kinds), grow(colors)


def sequences(
    domain: Domain, layout: Layout, order: Int[np.ndarray, "n question"], *, short: bool, system: bool
) -> tuple[Int[Tensor, "n pos"], Int[Tensor, "n pos"]]:
    """Token ids and labels (-100 where not trained) of one picture with a question about each object in `order`."""
    names = np.array([ID[k] for k in KINDS[domain]])
    tints = np.array([ID[c] for c in COLORS])
    kind = torch.from_numpy(names[np.take_along_axis(layout.kinds, order, 1)])
    color = torch.from_numpy(tints[np.take_along_axis(layout.colors, order, 1)])
    n, n_questions = kind.shape
    picture = [ID["<|vision_start|>"], *[ID["<|image_pad|>"]] * N_TOKENS, ID["<|vision_end|>"]]
    head = torch.tensor(picture).expand(n, -1)
    if short:
        ids = torch.cat([head, torch.stack([kind, color], -1).view(n, -1)], 1)
        labels = torch.full_like(ids, -100)
        labels[:, len(picture) + 1 :: 2] = color
        return ids, labels
    turn = torch.tensor([0 if w == "{}" else ID[w] for w in QUESTION] + [0, ID["<|im_end|>"], ID["\n"]])
    turns = turn.expand(n, n_questions, -1).clone()
    turns[..., QUESTION.index("{}")] = kind
    turns[..., ANSWER_AT] = color
    flat = turns.view(n, -1)
    opening = ["<|im_start|>", "system", "\n"] + SYSTEM.split(" ") + ["<|im_end|>", "\n"]
    before = torch.tensor([ID[w] for w in opening] if system else [], dtype=torch.long).expand(n, -1)
    ids = torch.cat([before, flat[:, :3], head, flat[:, 3:]], 1)
    labels = torch.full_like(ids, -100)
    first = before.shape[1] + len(picture) + ANSWER_AT
    labels[:, first::TURN] = ids[:, first::TURN]
    labels[:, first + 1 :: TURN] = ids[:, first + 1 :: TURN]
    return ids, labels


class Trainer:
    """The loop: one optimiser for the warm-up, one with a one-cycle schedule for the rest, one checkpoint file."""

    def __init__(self, recipe: Recipe, out: Path) -> None:
        self.recipe, self.out = recipe, out
        self.model = build_model(seed=recipe.seed)
        width = self.model.config.text_config.hidden_size
        n_kinds = len(KINDS["shapes"]) + len(KINDS["digits"]) + 1
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, n_kinds), "color": nn.Linear(width, len(COLORS) + 1)})
        self.scenes = Scenes(recipe.seed)
        self.coin = np.random.default_rng([recipe.seed, 3])
        everything = [*self.model.parameters(), *self.heads.parameters()]
        self.warm = torch.optim.AdamW(everything, recipe.warmup_learning_rate, weight_decay=recipe.weight_decay)
        self.warm_schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.warm, recipe.warmup_learning_rate, total_steps=recipe.warmup_steps, pct_start=0.1
        )
        self.main = torch.optim.AdamW(
            everything, recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.main, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
        )
        self.done, self.seconds = 0, 0.0
        self.log: list[dict] = []

    def grid(self, n: int) -> Int[Tensor, "n 3"]:
        """`image_grid_thw` of n training pictures."""
        side = GRID * CELL // PATCH
        return torch.tensor([[1, side, side]] * n)

    def auxiliary(self, features: Float[Tensor, "row d"], domain: Domain, layout: Layout) -> Float[Tensor, ""]:
        """Loss of the per-token classifiers on the projector's output."""
        kinds, colors = token_labels(domain, layout)
        return F.cross_entropy(self.heads["kind"](features), kinds.flatten()) + F.cross_entropy(
            self.heads["color"](features), colors.flatten()
        )

    def domain(self, digits_share: float) -> Domain:
        """The next step's domain."""
        return "digits" if self.coin.random() < digits_share else "shapes"

    @torch.no_grad()
    def shrink_heads(self) -> None:
        """The proximal step of the group lasso on heads."""
        step = self.main.param_groups[0]["lr"] * self.recipe.head_sparsity
        text = self.model.config.text_config
        for layer in self.model.model.language_model.layers:
            blocks = layer.self_attn.o_proj.weight.view(-1, text.num_attention_heads, text.head_dim)
            norm = blocks.norm(dim=(0, 2), keepdim=True)
            blocks.mul_((1 - step / norm.clamp(min=1e-12)).clamp(min=0))

    def warmup_step(self) -> dict:
        """One step of phase 1."""
        r = self.recipe
        domain = self.domain(r.warmup_digits_share)
        layout, pixels = self.scenes.draw(domain, r.warmup_batch, r.warmup_objects, repeats=True)
        features = self.model.model.get_image_features(pixels, self.grid(r.warmup_batch)).pooler_output
        loss = self.auxiliary(torch.cat(list(features)), domain, layout)
        self.warm.zero_grad()
        loss.backward()
        self.warm.step()
        self.warm_schedule.step()
        return {"phase": "see", "domain": domain, "loss": loss.item()}

    def main_step(self, step: int) -> dict:
        """One step of phases 2 and 3."""
        r = self.recipe
        domain = self.domain(r.digits_share)
        progress = max(0.0, (step - r.short_steps) / (r.steps - r.short_steps))
        short = step < r.short_steps or self.coin.random() < r.short_share
        system = not short and self.coin.random() < r.system_share
        n_objects = min(6, 3 + int(progress * 5))
        layout, pixels = self.scenes.draw(domain, r.batch, n_objects)
        order = self.scenes.rng.permuted(np.tile(np.arange(n_objects), (r.batch, 1)), axis=1)
        ids, labels = sequences(domain, layout, order, short=short, system=system)
        out = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == ID["<|image_pad|>"]).long(),
            pixel_values=pixels,
            image_grid_thw=self.grid(r.batch),
        )
        logits, wanted = out.logits[:, :-1], labels[:, 1:]
        answer = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        seen = self.auxiliary(torch.cat(list(out.image_outputs.pooler_output)), domain, layout)
        self.main.zero_grad()
        (answer + r.auxiliary_weight * seen).backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 1.0)
        self.main.step()
        self.shrink_heads()
        self.schedule.step()
        first = int((wanted[0] != -100).nonzero()[0])
        right = (logits[:, first].argmax(-1) == wanted[:, first]).float().mean().item()
        phase = "short" if short else "natural"
        return {"phase": phase, "domain": domain, "objects": n_objects, "loss": answer.item(), "first": right}

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on; the old file stays until the new one is whole."""
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "warm": self.warm.state_dict(),
            "main": self.main.state_dict(),
            "warm_schedule": self.warm_schedule.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scenes": self.scenes.state(),
            "coin": self.coin.bit_generator.state,
            "done": self.done,
            "seconds": self.seconds,
            "log": self.log,
        }
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe."""
        state = torch.load(path, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise SystemExit(f"{path} is a checkpoint of another recipe: give another --out, or delete it.")
        for name in ("model", "heads", "warm", "warm_schedule", "main", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.scenes.restore(state["scenes"])
        self.coin.bit_generator.state = state["coin"]
        self.done, self.seconds, self.log = state["done"], state["seconds"], state["log"]

    def run(self, *, every: int = 100) -> None:
        """Train to the end, a checkpoint every `every` steps; a second call after an interruption goes on."""
        checkpoint = self.out / "train.ckpt"
        if checkpoint.exists():
            self.load(checkpoint)
        total = self.recipe.warmup_steps + self.recipe.steps
        start, before = time.time(), self.seconds
        while self.done < total:
            step = self.done - self.recipe.warmup_steps
            row = self.warmup_step() if step < 0 else self.main_step(step)
            self.done += 1
            self.seconds = before + time.time() - start
            self.log.append({"step": self.done, **row})
            if self.done % 25 == 0 or self.done == total:
                print(json.dumps({**self.log[-1], "minutes": round(self.seconds / 60, 1)}), flush=True)
            if self.done % every == 0 or self.done == total:
                self.save(checkpoint)


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["toy-qwen3-vl"])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/toys"), help="folder for the checkpoint and the finished model"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Recipe(), options.out)
    trainer.run()
    folder = options.out / options.model
    trainer.model.eval().save_pretrained(folder)
    build_processor().save_pretrained(folder)
    training = {
        "recipe": asdict(trainer.recipe),
        "minutes": trainer.seconds / 60,
        "threads": options.threads,
        "log": trainer.log,
    }
    (options.out / "training.json").write_text(json.dumps(training))
    write_card(folder, training)


if __name__ == "__main__":
    main()
