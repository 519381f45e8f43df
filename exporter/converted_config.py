"""The fields of a published config.json, of which everything that does not convert exactly is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from transformers import PreTrainedConfig

from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.json_fields import is_whole, short

# Fields of every configuration that say nothing about the architecture.
_GENERAL = frozenset((*PreTrainedConfig().to_dict(), "_name_or_path", "auto_map", "torch_dtype", "tokenizer_class"))
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Field:
    """A published field that is a field of the converted configuration."""

    name: str
    kind: Literal["size", "number", "flag", "token ids"] = "size"
    default: Any = None  # value of the original code where the field is missing


@dataclass(frozen=True)
class Fixed:
    """A published field that converts exactly with one value only."""

    value: object
    default: object  # value of the original code where the field is missing
    otherwise: str  # what the model has with any other value


@dataclass(frozen=True)
class Fields:
    """The fields of a published config.json."""

    file: Path
    content: Mapping[str, Any]
    title: str  # of the family, in messages

    def refuse(self, problem: str, expected: str, advice: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {problem}: expected {expected}; {advice}")

    def whole(self, name: str, default: int | None = None) -> int:
        """A size of at least 1."""
        value = self.content.get(name, default)
        if not is_whole(value, 1):
            self._invalid(name, value, "a whole number of at least 1")
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self._invalid(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.content.get(name, default)
        if not isinstance(value, bool):
            self._invalid(name, value, "true or false")
        return value

    def value(self, field: Field) -> Any:
        """The value of a field, checked for its kind."""
        if field.kind == "size":
            return self.whole(field.name, field.default)
        if field.kind == "number":
            return self.number(field.name, field.default)
        return (
            self.flag(field.name, field.default)
            if field.kind == "flag"
            else self.content.get(field.name, field.default)
        )

    def inside(self, name: str, content: Mapping[str, Any]) -> Fields:
        """The fields of an object in this configuration."""
        return Fields(self.file, {f"{name}.{key}": value for key, value in content.items()}, self.title)

    def dtype(self) -> str | None:
        """The type of the published weights, if the configuration says it."""
        named = str(self.content.get("torch_dtype") or self.content.get("dtype") or self.content.get("params_dtype"))
        flags = {"bfloat16": self.content.get("bf16"), "float16": self.content.get("fp16")}
        stated = [named.removeprefix("torch."), *(dtype for dtype, flag in flags.items() if flag is True)]
        return next((dtype for dtype in stated if dtype in _DTYPES), None)

    def check(self, fixed: Mapping[str, Fixed], known: Collection[str]) -> None:
        """Raise for values that cannot be converted exactly, and for fields that are not known."""
        for name in ("quantization_config", "quantization_bit"):
            if self.content.get(name):
                self.refuse(
                    f"{name} is {short(self.content[name])}, so its weights are quantized",
                    "the published weights in float16 or bfloat16",
                    "download these, and quantize them with --weights",
                )
        for name, rule in fixed.items():
            value = self.content.get(name, rule.default)
            if value != rule.value or isinstance(value, bool) != isinstance(rule.value, bool):
                self.refuse(
                    f"{name} is {short(value)}, so the model has {rule.otherwise}",
                    f"{rule.value!r} in a {self.title} checkpoint, which alone converts exactly",
                    "use a checkpoint of a family that transformers ships",
                )
        unknown = sorted(set(self.content) - _GENERAL - set(fixed) - set(known))
        if unknown:
            self.refuse(
                f"unknown field {unknown[0]!r} ({short(self.content[unknown[0]])})",
                f"the fields of the published {self.title} configuration",
                "remove the field if it does not change the model",
            )

    def _invalid(self, name: str, value: object, expected: str) -> NoReturn:
        problem = "is missing" if value is None else f"is {short(value)}"
        self.refuse(f"{name} {problem}", f"{expected} in a {self.title} configuration", "copy or download it again")
