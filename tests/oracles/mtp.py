"""What the oracles of layers that predict further tokens share: everything is computed from the start, in one
pass for every question, and nothing is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.weights.folders import write_tokenizer

#: a depth, hidden states [n, width], and the tokens and positions [n] of the embeddings that join them
Ask = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


#: Only ids below are chosen: those of bytes. Behind them are some that end a reply.
ORDINARY = 256


@dataclass(frozen=True)
class Oracle:
    """`trunk` is the library's model. `step` gives what a depth leaves, [n, width], `keys` the values that
    RoPE has turned in the library's cache, [n, heads, size]. `tensors` are those of all depths, by the names
    of the hub."""

    trunk: transformers.PreTrainedModel
    num_depths: int
    step: Ask
    keys: Ask
    tensors: dict[str, torch.Tensor]

    def write(self, folder: Path) -> None:
        """One folder with all of it, as the hub would have it."""
        self.trunk.save_pretrained(folder)
        path = folder / "model.safetensors"
        own = {name: tensor.detach().clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(load_file(path) | own, path, metadata={"format": "pt"})
        write_tokenizer(folder)

    @torch.no_grad()
    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, width] after the last norm."""
        states: torch.Tensor = self.trunk.get_decoder()(torch.tensor([list(ids)]), use_cache=False)[0]
        return states[0]

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.trunk.get_output_embeddings()(hidden)
        return logits

    @torch.no_grad()
    def depths(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """For every depth d, what it leaves at positions 0 to tokens - 2 - d."""
        given, states, out = torch.tensor(list(ids)), self.hidden(ids), []
        for depth in range(self.num_depths):
            at = torch.arange(1 + depth, len(ids))
            states = self.step(depth, states[: len(at)], given[at], at)
            out.append(states)
        return out

    @torch.no_grad()
    def draft(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest guesses at what follows `ids`, of which the last has not been read by the trunk.
        Beyond the last depth that one goes on with what it left itself."""
        known, states, guesses = list(ids), self.hidden(ids[:-1]), []
        for index in range(count):
            depth = min(index, self.num_depths - 1)
            at = torch.arange(1 + depth, 1 + depth + len(states))
            left = self.step(depth, states, torch.tensor(known)[at], at)
            guesses.append(self._likeliest(left[-1:])[0])
            known.append(guesses[-1])
            states = left if depth + 1 < self.num_depths else torch.cat((states, left[-1:]))
        return guesses

    def speculate(self, prompt: Sequence[int], num_tokens: int, count: int) -> tuple[list[int], list[int]]:
        """Tokens that follow `prompt`, greedily, and how many guesses were right at each step."""
        said, accepted = [self._next(prompt)[-1]], []
        while len(said) < num_tokens:
            known = [*prompt, *said]
            guesses = self.draft(known, min(count, num_tokens - len(said) - 1))
            follows = self._next([*known, *guesses])[len(known) - 1 :]
            right = next((at for at, guess in enumerate(guesses) if guess != follows[at]), len(guesses))
            said += follows[: right + 1]
            accepted.append(right)
        return said, accepted

    def _next(self, ids: Sequence[int]) -> list[int]:
        """The likeliest token after each."""
        return self._likeliest(self.hidden(ids))

    def _likeliest(self, hidden: torch.Tensor) -> list[int]:
        tokens: list[int] = self.head(hidden)[:, :ORDINARY].argmax(-1).tolist()
        return tokens


def by_expert(prefix: str, name: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts of a layer, which the library holds in two tensors, in three each as files have them."""
    out = {}
    for expert, weight in enumerate(fused):
        at = f"{prefix}.experts.{expert}"
        if name == "down_proj":
            out[f"{at}.down_proj.weight"] = weight
        else:
            gate, up = weight.chunk(2)
            out |= {f"{at}.gate_proj.weight": gate, f"{at}.up_proj.weight": up}
    return out


@torch.no_grad()
def foreseeable(trunk: transformers.PreTrainedModel, *others: torch.nn.Module, share: float) -> None:
    """Make what the layers add to the residual stream `share` of what it is, so that much of what a token is
    followed by can be seen in the token itself."""
    for module in (trunk, *others):
        for name, parameter in module.named_parameters():
            if any(word in name for word in ("o_proj", "out_proj", "down_proj")):
                parameter.mul_(share)


@torch.no_grad()
def seeing(join: Any, share: float) -> None:
    """Let a depth's matrix pass its embedding on, beside `share` of what it is."""
    join.weight.mul_(share)
    width = join.weight.shape[0]
    join.weight[:, :width] += torch.eye(width)
