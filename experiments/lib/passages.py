"""Four texts of our own, for studies that need real sentences and no data set."""

from __future__ import annotations

from typing import Protocol

PASSAGES = (
    """The lighthouse at Carrow Point had been dark for eleven years when Maren bought it. The roof leaked, the stairs
were missing every fourth step, and gulls had taken the lamp room for themselves. She began with the door. It took her
two days to free the hinges and one more to plane the wood until it closed without a sound. In the evenings she read
the logbooks that the last keeper had left behind: forty volumes, one for each year, with the weather, the ships and
now and then a sentence that had nothing to do with either. On the third of March he had written that the sea sounded
like someone turning pages in the next room. Maren copied that line and pinned it above the stove. By summer the
stairs were whole again, and the gulls had moved to the boathouse roof, from where they watched her work. The lamp
itself was the hardest part. Nobody made lenses of that kind any longer, so she wrote to a museum in the north, which
had two, and asked whether they would part with the one that was cracked. Their answer came in October, in a crate
filled with straw.""",
    """To understand why bread rises, it helps to look at flour under water. Two proteins in wheat, glutenin and
gliadin, do little while they are dry. Once they are wet and worked by hand, they link up and form long elastic
strands, which are called gluten. Yeast, a fungus of a single cell, feeds on the sugars that enzymes cut from starch.
It gives off carbon dioxide and a little alcohol. The gas collects in small pockets, and because gluten stretches
without tearing, the pockets grow and the dough swells. Salt slows the yeast down and makes the strands tighter, which
is why dough without salt rises fast and collapses easily. In the oven three things happen in order. First the gas
expands with the heat, and the loaf springs up. Then, near sixty degrees, the yeast dies and starch begins to take up
water. At last the proteins set, so that the shape stays when the gas has gone. The crust gets its colour and much of
its taste from reactions between sugars and amino acids, which need more than a hundred and forty degrees and a dry
surface. A baker who wants a thin crust lets steam into the oven for the first ten minutes, and a baker who wants a
thick one does not.""",
    """Minutes of the allotment society, second meeting of the year. Present were nine members, two guests and a dog.
Item one: the water pump. The repair has cost 340 crowns, of which the district pays half. Item two: the hedge along
the railway. Mr Okafor reported that it is now three metres high and keeps the sun off plots 14 to 19 until eleven in
the morning. It was agreed to cut it to two metres, but not before the birds have left their nests, so after the end
of July. Item three: theft of pumpkins. Ms Lind has lost five, Mr Brandt two, the school four. A camera was proposed
and voted down by six votes to three. Instead each member will write the plot's number on every pumpkin with a nail
while it is small; the scar grows with the fruit. Item four: compost. The second bin is full, the third is half full,
and somebody keeps throwing in painted wood. The chair will put up a sign. Item five: the feast in September. Last
year 60 people came and the soup was gone by two o'clock. The committee asks for two more kettles and for somebody who
can play something other than the accordion. The next meeting is on the fourteenth of June at seven in the evening, in
the tool shed.""",
    """A farmer has three fields. The first is a square with sides of 120 metres, the second a rectangle of 90 by 200
metres, and the third a triangle whose base is 160 metres and whose height is 75 metres. He wants to sow wheat on two
of them and leave one for his sheep. Each hectare of wheat needs 180 kilograms of seed, and seed costs 0.85 crowns a
kilogram. A sheep needs 400 square metres. To find out which field to leave, we first write down the areas. The square
has 120 times 120, which is 14,400 square metres. The rectangle has 90 times 200, which is 18,000 square metres. The
triangle has half of 160 times 75, which is 6,000 square metres. A hectare is 10,000 square metres. If the triangle
goes to the sheep, there is room for 15 of them, and the wheat takes 32,400 square metres, or 3.24 hectares. That
needs 583.2 kilograms of seed, which costs 495.72 crowns. If the square goes to the sheep instead, there is room for
36 of them, and the wheat takes 24,000 square metres, or 2.4 hectares. Now we compare the two plans. The farmer has 28
sheep, he does not want to buy hay, and he can spend at most 450 crowns on seed. Therefore""",
)


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def encoded(tokenizer: Encoder, lengths: list[int]) -> list[list[int]]:
    """The beginning of each passage, so many tokens of it.

    Raises:
      ValueError: a passage has fewer.
    """
    rows = []
    for number, (passage, length) in enumerate(zip(PASSAGES, lengths, strict=True)):
        tokens = tokenizer.encode(passage.replace("\n", " "), add_special_tokens=False)
        if len(tokens) < length:
            raise ValueError(f"expected at most {len(tokens)} tokens of passage {number}; got a length of {length}")
        rows.append(tokens[:length])
    return rows
