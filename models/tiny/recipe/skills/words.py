"""Words, names and places the items are made of: short lists of real ones and an endless supply of invented ones."""

from __future__ import annotations

import random

WORDS = (
    "apple river stone cloud green table house light water bread music paper chair garden window winter summer forest "
    "silver golden orange yellow purple mountain ocean island bridge castle engine rocket planet signal market doctor "
    "teacher pencil letter number button camera candle carpet cherry circle coffee copper cotton dragon eagle field "
    "flower glass grape hammer honey horse iron jacket jungle kettle ladder lemon lion magnet marble meadow melon mirror "
    "monkey needle onion panda pepper piano pillow pirate pocket potato prince puzzle rabbit ribbon saddle salmon school "
    "shadow shell ship shoe snow soup spider spoon spring square star storm street sugar sun sword temple tiger tower "
    "train tree trumpet turtle valley velvet violin wagon walnut whale wheel wolf wood zebra dog cat bird fish red blue"
).split()

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Sam Tina Uma Victor "
    "Wendy Xavier Yara Zoe Alice Bob Carol Daniel Eva Frank Gina Hugo Ida Jonas Kim Laura Max Nora Olga Peter Ravi Sara "
    "Tom Vera Will Amir Bella Chen Diego Elena Fatima Hana Ivan Julia Kofi Lina Marco Noah Omar Priya Rita Sofia Theo"
).split()

CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Warsaw Tokyo Delhi Cairo Lima Boston Chicago "
    "Denver Seattle Toronto Sydney Nairobi Lagos Seoul Hanoi Zurich Geneva Milan Munich Hamburg Lyon Porto Kyoto Mumbai "
    "Austin Dallas Miami Atlanta Quebec Havana Bogota Tunis Dakar Accra Riga Tallinn Helsinki Stockholm Bergen"
).split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl sh st th tr".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "nd", "x", "ck"]


def invented(rng: random.Random, syllables: int | None = None) -> str:
    """A pronounceable word that no list holds, 2 to 9 letters."""
    count = syllables or rng.choice((1, 2, 2, 2, 3))
    while True:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)
        if len(word) <= 9:
            return word


def word(rng: random.Random) -> str:
    """A lower-case word, real or invented."""
    return rng.choice(WORDS) if rng.random() < 0.4 else invented(rng)


def name(rng: random.Random) -> str:
    """A first name, real or invented."""
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).capitalize()


def city(rng: random.Random) -> str:
    """A city, real or invented."""
    return rng.choice(CITIES) if rng.random() < 0.6 else invented(rng).capitalize()
