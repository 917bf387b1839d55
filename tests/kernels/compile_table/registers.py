"""Uniform registers of a compiled kernel that something reads and nothing writes: they hold what another kernel left.

Assemblers have made such code (kernels.gpu.launch.compiler says which). It works for as long as the register happens to
be zero, so no test that runs the kernel finds it reliably; the disassembly shows it always.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "VOTEU", "LDCU", "REDUX", "CREDUX")
"""Beginnings of instructions that write their first operand behind predicates, if it is a uniform register at all."""
_BLACKWELL = "UTC"
"""Beginning of the tensor cores' instructions from compute capability 10.0 on."""
_PREDICATE = re.compile(r"U?P[0-9T]")
_READERS = ("UTMA", "UBLK", "UCGA")
"""Those that only read, though they begin alike: the copy engine's."""


def unwritten(disassembly: str) -> dict[int, str]:
    """Numbers of uniform registers that are read and never written, each with the first instruction that reads it.

    Args:
        disassembly: of one kernel, as nvdisasm prints it.
    """
    written: set[int] = set()
    readers: dict[int, str] = {}
    for match in _INSTRUCTION.finditer(disassembly):
        operation, text = match.groups()
        operands = [operand.strip() for operand in text.split(",")]
        if _writes(operation):
            while operands and _PREDICATE.fullmatch(operands[0]):
                del operands[0]
            if operands and (first := _REGISTER.fullmatch(operands[0])):
                written |= {int(first[1]) + place for place in range(_width(operation))}
                del operands[0]
            text = ",".join(operands)
        for number in _read(operation, text, operands):
            readers.setdefault(number, " ".join(match[0].split()))
    return {number: readers[number] for number in sorted(readers.keys() - written)}


def _writes(operation: str) -> bool:
    """Whether it may write a uniform register: a comparison writes predicates only."""
    return operation.startswith(_WRITERS) and not operation.startswith(_READERS) and "SETP" not in operation


def _width(operation: str) -> int:
    """Registers that an instruction writes."""
    return 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1


def _read(operation: str, text: str, operands: list[str]) -> set[int]:
    numbers: set[int] = set()
    if operation.startswith(_BLACKWELL):
        # A descriptor each of A, unless it is in tensor memory, and of B.
        numbers = {int(start) + place for start in _DESCRIPTOR.findall(text) for place in range(2)}
    elif descriptor := _DESCRIPTOR.search(text):
        # Two descriptors, two registers each. With A in registers only the second one is looked at.
        start, text = int(descriptor[1]), text.replace(descriptor[0], "")
        held = re.fullmatch(r"R\d+(\.\w+)?", operands[1]) is not None
        numbers |= set(range(start + 2 if held else start, start + 4))
    return numbers | {int(number) for number in _REGISTER.findall(text)}
