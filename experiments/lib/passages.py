"""Four short texts for studies that need real sentences."""

from __future__ import annotations

from typing import Protocol

PASSAGES = (
    """The lighthouse at Carrow Point had been dark for eleven years when Maren bought it. The roof leaked, the stairs
were missing every fourth step, and gulls had taken the lamp room for themselves. She began with the door. It took her
two days to free the hinges and one more to plane the wood until it closed without a sound. In the evenings she read
the logbooks that the last keeper had left behind: forty volumes, one for each year, with the weather, the ships and
now and then a sentence that had nothing to do with either.""",
    """To understand why bread rises, it helps to look at flour under water. Two proteins in wheat, glutenin and
gliadin, do little while they are dry. Once they are wet and worked by hand, they link up and form long elastic
strands, which are called gluten. Yeast, a fungus of a single cell, feeds on the sugars that enzymes cut from starch.
It gives off carbon dioxide and a little alcohol. The gas collects in small pockets, and because gluten stretches
without tearing, the pockets grow and the dough swells.""",
    """Minutes of the allotment society, second meeting of the year. Present were nine members, two guests and a dog.
Item one: the water pump. The repair has cost 340 crowns, of which the district pays half. Item two: the hedge along
the railway. Mr Okafor reported that it is now three metres high and keeps the sun off plots 14 to 19 until eleven in
the morning.""",
    """A farmer has three fields. The first is a square with sides of 120 metres, the second a rectangle of 90 by 200
metres, and the third a triangle whose base is 160 metres and whose height is 75 metres. He wants to sow wheat on two
of them and leave one for his sheep. Each hectare of wheat needs 180 kilograms of seed, and seed costs 0.85 crowns a
kilogram. A sheep needs 400 square metres. To find out which field to leave, we first write down the areas.""",
)


class Encoder(Protocol):
    """The part of a tokenizer that `encoded` needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def encoded(tokenizer: Encoder, lengths: list[int]) -> list[list[int]]:
    """The first `lengths[i]` tokens of passage i.

    Raises:
      ValueError: if a passage is shorter.
    """
    rows = []
    for number, (passage, length) in enumerate(zip(PASSAGES, lengths, strict=True)):
        tokens = tokenizer.encode(passage.replace("\n", " "), add_special_tokens=False)
        if len(tokens) < length:
            raise ValueError(f"expected at most {len(tokens)} tokens of passage {number}; got a length of {length}")
        rows.append(tokens[:length])
    return rows
