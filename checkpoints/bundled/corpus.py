"""Short stories, questions and sums from a small seeded grammar: the text the bundled checkpoint is trained on.

GRAMMAR has three kinds of rule, told apart by what ends their first line:

    name:            one of the lines below, drawn anew at every use
    name >           all of the lines below, in order
    a b c =          a table; at the first use of any column a row is drawn, and it holds for the whole document

Within a line `{name}` uses a rule or a column (`{Name}` with a capital letter), `(x|y)` draws x or y, and `//`
starts a new paragraph. What has to hold together in a story (a person's name and pronouns, the thing that is lost
and its color, a number and its half) is a row of a table; only what may vary freely is drawn anew.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

GRAMMAR: Final = """
hero he him his kind =
  (Lily|Mia) ; she ; her ; her ; (little|young) girl
  (Emma|Rosie) ; she ; her ; her ; (kind|clever) girl
  (Tim|Max) ; he ; him ; his ; (little|young) boy
  (Jack|Sam) ; he ; him ; his ; (kind|clever) boy
  Pip ; he ; him ; his ; (little|white) rabbit
  Rusty ; he ; him ; his ; (little|red) fox
  Honey ; she ; her ; her ; (little|brown) bear
  Dot ; she ; her ; her ; (tiny|gray) mouse
friend fhe fhim fhis fkind =
  (Amy|Grace) ; she ; her ; her ; (tall|friendly) girl
  (Kate|Daisy) ; she ; her ; her ; (funny|friendly) girl
  (Tom|Peter) ; he ; him ; his ; (tall|friendly) boy
  (Billy|Oscar) ; he ; him ; his ; (funny|friendly) boy
  Hoot ; she ; her ; her ; (wise|old) owl
  Shelly ; she ; her ; her ; (slow|green) turtle
  Bruno ; he ; him ; his ; (big|strong) bear
  Hazel ; she ; her ; her ; (quick|red) squirrel
elder ehe ehim =
  (mom|mother) ; she ; her
  (dad|father) ; he ; him
  grandma ; she ; her
  grandpa ; he ; him
place at =
  park ; in the park
  garden ; in the garden
  forest ; in the forest
  beach ; on the beach
  farm ; on the farm
  river ; by the river
  lake ; by the lake
  hill ; on the hill
  meadow ; in the meadow
  playground ; at the playground
color =
  (red|blue|green|yellow|white|black|pink|purple)
toy =
  (ball|doll|boat|car|drum|teddy bear|hat|train|robot|horse)
flyer =
  (kite|balloon|hat|paper plane|scarf)
food other =
  (cookies|pies|cakes) ; (bread and cheese|soup|nuts)
  (apples|pears|plums) ; (bread and cheese|soup|nuts)
  (sandwiches|pancakes) ; (berries|grapes|nuts)
many half =
  four ; two
  six ; three
  eight ; four
  ten ; five
hidden =
  (behind the fence|under a bush|inside an old box|between two stones|behind the wall|under a bridge)
tool reach =
  a long stick ; pushed the {flyer} with it
  a ladder ; climbed up to the {flyer}
  a rope ; pulled the branch down with it
fear alarm aid lesson =
  the dark ; When the lights went out ; a little lamp ; the dark was only quiet and soft
  thunder ; When the sky went boom ; a drum ; thunder was only the music of the sky
  the big dog next door ; When the dog barked ; a bone for the dog ; the dog only wanted a friend
  deep water ; When {he} came near the lake ; a round float ; the water could carry {him}
  bees ; When a bee flew by ; a spoon of honey ; the bees were only busy with their flowers
breakable damage repair =
  toy plane ; lost a wing ; glue the wing back on
  wagon ; lost a wheel ; put the wheel back on
  teddy bear ; got a big hole ; sew the hole shut
  kite ; got a long tear ; sew the tear shut
  toy boat ; lost its sail ; tie a new sail on
shelter =
  (inside an old barn|under a big tree|inside a small cave|under a stone bridge|inside an empty hut)
baby cry nest =
  baby duck ; Quack, quack ; at the pond
  kitten ; Meow, meow ; in the barn
  baby bird ; Tweet, tweet ; in the old oak tree
  puppy ; Woof, woof ; behind the mill
  lamb ; Baa, baa ; on the green hill
craft stuff source =
  necklace ; shells ; on the beach
  crown ; yellow flowers ; in the meadow
  basket ; straw ; on the farm
  toy boat ; wood ; in the forest
  picture ; colorful leaves ; in the park
skill fail done =
  ride a bike ; {he} fell off ; {he} rode all the way down the street
  swim ; {he} went under ; {he} swam across the pond
  skate ; {he} slipped and fell ; {he} skated in a big circle
  jump rope ; {his} feet got caught ; {he} jumped twenty times
  play the flute ; only a squeak came out ; {he} played a sweet song
  bake bread ; the bread got burned ; the bread was soft and warm
plant wonder =
  sunflower ; taller than {hero}
  pumpkin ; so big that nobody could lift it
  rose ; as red as the evening sky
  bean plant ; as high as the roof
  strawberry plant ; full of sweet red berries
fragile =
  (vase|cup|lamp|plate|teapot|bowl)
secret =
  (under the bed|behind the door|in a box|under the rug|in the closet)
illness remedy =
  a cold ; warm soup
  a fever ; cool lemon water
  a sore throat ; hot tea with honey
metal treasure joy =
  (gold|silver|rusty) ; a book of stories ; They read the stories to each other until the moon came up.
  (gold|silver|rusty) ; a music box ; They danced to its music until the sun went down.
  (gold|silver|rusty) ; a bag of coins ; They bought ice cream for all their friends.
  (gold|silver|rusty) ; a map of the stars ; That night they found every star on the map.
dream =
  (a castle in the clouds|a ship with golden sails|a friendly dragon|a garden on the moon|a talking tree)

day:
  One day
  One (sunny|warm|bright|cool|windy|quiet) (day|morning|afternoon)
  On (Monday|Friday|Saturday|Sunday)
habit:
  {He} loved to (sing|dance|draw|play outside|look at the clouds|count the stars|listen to stories).
  {He} was (kind|brave|gentle|curious|cheerful) and (always smiled|had many friends|loved to learn new things).
  Every day, {he} (helped {his} {elder}|went for a walk|sang a happy song|played with {his} friends).
opening:
  Once upon a time, there was a {kind} named {hero}. {habit}
  Once upon a time, there was a {kind} named {hero}. {He} lived in a (small|little|big|cozy) house. {habit}
  Once upon a time, a {kind} named {hero} lived (near the sea|near the forest|on a hill|in a small village). {habit}
  There was once a {kind} named {hero}. {habit}
  {Hero} was a {kind} who lived (near the sea|near the forest|on a hill|in a small village). {habit}
sad:
  {Hero} (was|felt) (very sad|sad|so sad).
  {Hero} (sat down and cried|began to cry|wanted to cry).
meets:
  (Just then|Soon|After a while), {his} friend {friend} came by. {Friend} was a {fkind}.
  (Just then|Soon|After a while), a {fkind} named {friend} came along.
  {His} friend {friend}, a {fkind}, (heard|saw) {him} and came to help.
close:
  {Hero} and {friend} were best friends from that day on.
  They (laughed|sang|played) together until it was time to go home.
  {Hero} went home with a (big smile|happy heart).
q:
  //Question:
a:
  //Answer:
who:
  {q} Who was the story about? {a} The story was about {hero}.
  {q} Who was {hero}? {a} {Hero} was a {kind}.

plot:
  {lost}
  {stuck}
  {afraid}
  {share}
  {mend}
  {picnic}
  {stray}
  {gift}
  {practice}
  {seed}
  {truth}
  {sick}
  {key}
  {race}
  {bedtime}
lost >
  {Day}, {hero} took {his} {color} {toy} to the {place}. {He} played with it (all morning|for a long time).
  But when it was time to go home, the {toy} was gone! "(Oh no|Oh dear)! Where is my {toy}?" {he} (cried|said).
  {He} looked (under the bench|in the grass|near the gate|behind the tree), but it was not there. {sad}
  // {meets} "(Why are you sad|What is wrong), {hero}?" asked {friend}. "I lost my {color} {toy}," said {hero}.
  "(Do not worry|Do not cry)," said {friend}. "(I will help you|We will find it together|Let us look for it)."
  They looked (everywhere|here and there). At last, {friend} looked {hidden} and saw something {color}.
  It was the {toy}!
  // {Hero} was so (happy|glad) that {he} (jumped up and down|laughed out loud). "Thank you, {friend}!" {he} said.
  (From that day on, {hero} took good care of {his} {toy}.|{close}) (||{who}|{lost_quiz}|{lost_quiz})
lost_quiz:
  {q} What did {hero} lose? {a} {Hero} lost {his} {color} {toy}.
  {q} Who found the {toy}? {a} {Friend} found the {toy} {hidden}.
stuck >
  {Day}, {hero} was playing {at} with {his} {color} {flyer}.
  (A strong wind came|The wind blew hard), and the {flyer} flew up into a tall tree.
  {Hero} (jumped as high as {he} could|shook the tree|threw a stone), but the {flyer}
  (did not come down|was too high). {sad}
  // {meets} "My {flyer} is stuck in the tree," said {hero}. {Friend} (looked up|thought for a moment).
  "I have an idea," {fhe} said. "We can use {tool}." {Friend} brought {tool} and {reach}. Down came the {flyer}!
  // "(Thank you|You are so clever), {friend}!" said {hero}. {close}
  (||{who}|{q} Where was the {flyer}? {a} The {flyer} was stuck in a tall tree.
  |{q} What did {friend} use? {a} {Friend} used {tool}.)
afraid >
  But {hero} was (afraid|scared) of {fear}. {alarm}, {he} (shut {his} eyes|began to shake|ran to {his} bed).
  // {Day}, {his} {elder} said, "Everyone is afraid of something. (Being brave means to try|You can be brave).
  Here is {aid}. It will help you." "I will try," said {hero} in a small voice.
  {He} took a deep breath and counted to (three|five|ten). {alarm}, {he} held {aid} and did not run away.
  Soon {hero} (saw|learned|found out) that {lesson}. // "(I did it|I was brave)!" {he} (said|shouted).
  {His} {elder} was very proud of {him}. From that day on, {hero} was not afraid of {fear} anymore.
  (||{who}|{q} What was {hero} afraid of? {a} {Hero} was afraid of {fear}.)
share >
  {Day}, {hero} had {many} {food}. {He} sat down {at} to eat them. {meets}
  {Friend} looked hungry. "I (forgot my lunch|lost my lunch|have nothing to eat)," {fhe} said.
  // {Hero} wanted to eat all the {food}, but {he} (felt sorry for {friend}|wanted to be kind).
  "Let us share," said {hero}.
  {He} gave {half} {food} to {friend} and kept {half}. "(Thank you|You are so kind), {hero}!" said {friend}.
  // The next day, {hero} (was hungry|forgot {his} lunch). This time {friend} had {other} and shared it with {him}.
  They (learned|both knew) that (sharing is good|food tastes better with a friend). {close}
  (||{who}|{q} How many {food} did {friend} get? {a} {Friend} got {half} {food}.)
mend >
  {Day}, {hero} and {his} friend {friend} played with a {color} {breakable}. It belonged to {friend}.
  {Hero} (ran too fast|was not careful), and the {breakable} {damage}. "Oh no! My {breakable}!" cried {friend}.
  // {Hero} felt (bad|very sorry). "I am sorry, {friend}," {he} said. "I will help you fix it."
  They went to {his} {elder}. "Can you help us?" asked {hero}. "Yes," said {his} {elder}. "We can {repair}."
  They worked (together|hard|all afternoon). // Soon the {breakable} was as good as new. {Friend}
  (smiled|was happy again).
  "(I am not angry anymore|Thank you for fixing it)," {fhe} said. {close}
  (||{who}|{q} What was broken? {a} The {color} {breakable} {damage}.
  |{q} Who helped them? {a} {Hero} asked {his} {elder} for help.)
picnic >
  {Day}, {hero} and {his} friend {friend} went to the {place} for a picnic.
  They brought {food} and a {color} blanket.
  They had just sat down when (dark clouds came|it began to rain|big drops began to fall).
  "Oh no, our picnic!" cried {hero}.
  // "Follow me!" said {friend}. They ran as fast as they could and hid {shelter}. It was (dry|warm and dry) there.
  They put the {color} blanket on the ground, ate the {food} and told (funny stories|each other jokes).
  // (At last|After a while), the rain stopped and a rainbow came out.
  "This was the best picnic ever," said ({hero}|{friend}).
  {close} (||{who}|{q} Where did they hide? {a} They hid {shelter}.|{q} What did they eat? {a} They ate {food}.)
stray >
  {Day}, {hero} was walking {at} when {he} heard a (small|tiny|soft) sound. "{cry}!" It was a {baby}.
  "Are you lost?" asked {hero}. The {baby} looked (sad|scared). It wanted its mother.
  // {Hero} (gave it some water|held it gently|put {his} {color} scarf around it). "I will help you," {he} said.
  {meets}
  "Have you seen the mother of this {baby}?" asked {hero}. "Yes," said {friend}. "I saw her {nest}."
  They took the {baby} there. // {nest_mother} "{cry}!" said the {baby}. It was (so happy|safe again).
  "(Well done|You were very kind), {hero}," said {friend}. {close}
  (||{who}|{q} What did {hero} find? {a} {Hero} found a {baby}.
  |{q} Where was the mother? {a} The mother was {nest}.)
nest_mother:
  The mother was waiting {nest}.
  The mother came running to her {baby}.
gift >
  {His} best friend was a {fkind} named {friend}.
  {Day}, it was {friend}'s birthday, but {hero} had no money for a gift.
  "I will make something," {he} said. {He} found {stuff} {source} and began to make a {craft}.
  It was not easy, but {hero} worked (all day|very hard|all morning) until it was done.
  // At the party, {hero} was (shy|worried). "What if {friend} does not like it?" {he} thought.
  But when {friend} opened the box, {fhe} (smiled|laughed with joy). "A {craft} made of {stuff}! Did you make it?"
  {fhe} asked.
  "Yes, I made it for you," said {hero}. // "It is the best gift of all," said {friend}. {close}
  (||{who}|{q} What did {hero} make? {a} {Hero} made a {craft} of {stuff}.
  |{q} Who had a birthday? {a} It was {friend}'s birthday.)
practice >
  {Hero} wanted to learn to {skill}. {Day}, {he} tried for the first time, but {fail}.
  {He} tried again, but {fail} again.
  "I will never learn to {skill}," said {hero}. {sad} // {meets}
  "Do not give up," said {friend}. "You only need to practice."
  So {hero} practiced every day (for a week|with {friend}).
  // Then {he} tried (again|once more). This time, {done}! "Look, {friend}! I can {skill}!" {he} shouted.
  {Friend} clapped {fhis} hands. {Hero} was (so happy|very proud). {close}
  (||{who}|{q} What did {hero} learn? {a} {Hero} learned to {skill}.)
seed >
  {Day}, {his} {elder} gave {hero} a tiny seed. "Plant it in the garden and wait," {ehe} said.
  {Hero} dug a (small|little) hole, put the seed in and gave it some water.
  The next day, {he} looked, but nothing was there.
  // "When will it grow?" asked {hero}. "You must wait," said {his} {elder}. "Good things take time."
  So {hero} gave it water every day and (sang|talked) to it. The (sun|rain) came, and the (days|weeks) went by.
  // (At last|One morning), {hero} saw a small green leaf. It grew and grew and became a {plant}. It was {wonder}!
  "{You_were_right}," said {hero} to {his} {elder}. {Hero} was (glad|happy) that {he} had waited.
  (||{who}|{q} What grew in the garden? {a} A {plant} grew in the garden. It was {wonder}.)
you_were_right:
  You were right. Good things take time
  Look what my seed has become
truth >
  {Day}, {hero} was playing with a ball in the house. The ball hit the {color} {fragile} of {his} {elder}. Crash!
  The {fragile} was broken. {Hero} was (scared|afraid). {He} hid the pieces {secret}.
  // When {his} {elder} came home, {ehe} asked, "Where is my {color} {fragile}?" "I do not know," said {hero}.
  But {he} felt bad and could not (eat|sleep|play). // At last, {hero} went to {his} {elder}.
  "I broke the {fragile} with my ball and hid the pieces {secret}. I am sorry," {he} said.
  {His} {elder} (hugged {him}|took {his} hand). "(I am proud of you|Thank you). You told the truth."
  {Hero} felt (much better|happy again). From that day on, {he} always told the truth.
  (||{who}|{q} What did {hero} break? {a} {Hero} broke the {color} {fragile}.
  |{q} Where were the pieces? {a} The pieces were {secret}.)
sick >
  {Day}, {hero} went to the house of {his} friend {friend}.
  {He} wanted to play, but {friend} was in bed with {illness}.
  "I can not play today," said {friend}. {Hero} (felt sorry for {fhim}|wanted to help).
  // {He} ran home and made {remedy} with {his} {elder}. Then {hero} (carried|took) the {remedy} to {friend}.
  {Friend} drank it and smiled. {Hero} sat by the bed and told {fhim} a story about {dream}.
  // The next day, {friend} felt (much better|well again). "Your {remedy} helped me," said {friend}. {close}
  (||{who}|{q} Who was sick? {a} {Friend} was in bed with {illness}.
  |{q} What did {hero} bring? {a} {Hero} brought {remedy}.)
key >
  {Day}, {hero} found a {metal} key {at}. "What does this key open?" {he} asked. {He} tried it on
  (the gate|the door of the house|an old door), but it did not fit. // {meets} {Hero} showed {fhim} the {metal} key.
  "Let us (look|search) together," said {friend}. They walked and walked.
  At last, they found a {color} box {hidden}.
  {Hero} put the key into the lock. Click! The box was open. // Inside was {treasure}. "(Wow|Look)!" said {friend}.
  {joy} {close}
  (||{who}|{q} What was in the box? {a} There was {treasure} in the {color} box.
  |{q} What did {hero} find? {a} {Hero} found a {metal} key.)
race >
  {His} friend {friend} was a {fkind}. {Day}, {friend} said, "I am faster than you. Let us race to the {place}!"
  "(All right|Yes, let us race)," said {hero}. They ran as fast as they could. {Friend} was (far ahead|in front).
  // But then {friend} fell down and hurt {fhis} foot. {Hero} could win the race now, but {he} stopped.
  "Are you hurt?" asked {hero}. {He} helped {friend} up, and they walked to the {place} together.
  // "You (could have won|did not win)," said {friend}. "But (you are a good friend|you helped me).
  Thank you, {hero}." {close}
  (||{who}|{q} Where did they race? {a} They raced to the {place}.|{q} Who fell down? {a} {Friend} fell down.)
bedtime >
  One night, {hero} could not sleep. {He}
  (counted sheep|turned from side to side|looked at the ceiling), but {he} was wide awake.
  {He} went to {his} {elder}. "I can not sleep," {he} said. // {His}
  {elder} gave {him} a cup of (warm milk|sweet tea)
  and told {him} a story about {dream}. {Hero} closed {his} eyes and listened. Soon {he} was asleep.
  // {He} dreamed of {dream}. In the morning, {hero} ran to {his} {elder}. "I had the best dream!" {he} said.
  {His} {elder} (smiled|laughed) and (hugged {him}|asked {him} to tell it all).
  (||{who}|{q} What did {hero} dream of? {a} {Hero} dreamed of {dream}.)
story >
  {opening} {plot}

thing hue =
  the sky ; blue
  grass ; green
  the sun ; yellow
  snow ; white
  the night ; black
  a ripe tomato ; red
animal call young legs =
  dog ; woof ; puppy ; four
  cat ; meow ; kitten ; four
  sheep ; baa ; lamb ; four
  duck ; quack ; duckling ; two
  cow ; moo ; calf ; four
word opposite =
  hot ; cold
  big ; small
  happy ; sad
  fast ; slow
  day ; night
  old ; new
today tomorrow =
  Monday ; Tuesday
  Tuesday ; Wednesday
  Wednesday ; Thursday
  Thursday ; Friday
  Friday ; Saturday
  Saturday ; Sunday
  Sunday ; Monday
first:
  {q} What color is {thing}? {a} {Thing} is {hue}.
  {q} What is the opposite of {word}? {a} The opposite of {word} is {opposite}.
second:
  {q} What does a {animal} say? {a} A {animal} says {call}.
  {q} What is a baby {animal} called? {a} A baby {animal} is called a {young}.
third:
  {q} How many legs does a {animal} have? {a} A {animal} has {legs} legs.
  {q} What day comes after {today}? {a} {Tomorrow} comes after {today}.
facts:
  {first} {second} {third}
  {third} {first} {second}
"""

ALTERNATIVES: Final = re.compile(r"\(([^()]*)\)")
REFERENCE: Final = re.compile(r"\{(\w+)\}")
PARAGRAPH: Final = re.compile(r"\s*//\s*")
HEADER: Final = re.compile(r"([\w ]+?) ?([:=>])")


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grammar:
    """Rules by name: the alternatives of a `:` or `>` rule, and for each column of a `=` rule its table."""

    choices: Mapping[str, tuple[str, ...]]
    tables: Mapping[str, Table]


def parse(text: str) -> Grammar:
    """Reads the notation in the module's docstring; ValueError names a row that has not its table's columns."""
    choices: dict[str, tuple[str, ...]] = {}
    tables: dict[str, Table] = {}
    for block in re.split(r"\n+(?=\S)", text.strip()):
        head, *lines = (line.strip() for line in block.splitlines())
        header = HEADER.fullmatch(head)
        if header is None:
            raise ValueError(f"grammar: {head!r} begins no rule; end it with ':', '>' or '='")
        name, mark = header.groups()
        if mark == "=":
            table = parse_table(tuple(name.split()), lines)
            tables |= dict.fromkeys(table.columns, table)
        else:
            choices[name] = tuple(lines) if mark == ":" else (" ".join(lines),)
    return Grammar(MappingProxyType(choices), MappingProxyType(tables))


def parse_table(columns: tuple[str, ...], lines: list[str]) -> Table:
    rows = tuple(tuple(line.split(" ; ")) for line in lines)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"grammar: row {row} has {len(row)} cells; its table has the columns {columns}")
    return Table(columns, rows)


@dataclass(frozen=True)
class Telling:
    """One document being written: the rows drawn so far hold until its end."""

    grammar: Grammar
    rng: random.Random
    drawn: dict[str, str] = field(default_factory=dict)

    def expand(self, template: str) -> str:
        """The text of a template; KeyError for a name the grammar does not have."""
        while "(" in template:
            template = ALTERNATIVES.sub(lambda match: self.rng.choice(match[1].split("|")), template)
        return REFERENCE.sub(lambda match: self.value(match[1]), template)

    def value(self, name: str) -> str:
        key = name[0].lower() + name[1:]
        text = self.column(key) if key in self.grammar.tables else self.choice(key)
        return text if key == name else text[0].upper() + text[1:]

    def choice(self, name: str) -> str:
        return self.expand(self.rng.choice(self.grammar.choices[name]))

    def column(self, name: str) -> str:
        if name not in self.drawn:
            table = self.grammar.tables[name]
            row = self.rng.choice(table.rows)
            self.drawn.update((column, self.expand(cell)) for column, cell in zip(table.columns, row, strict=True))
        return self.drawn[name]


def sums(rng: random.Random) -> str:
    """Two to four small sums and differences, as questions with their answers."""
    return "\n".join(sum_line(rng) for _ in range(rng.randint(2, 4)))


def sum_line(rng: random.Random) -> str:
    a, b = rng.randint(0, 5), rng.randint(0, 5)
    exercise, result = (f"{a} + {b}", a + b) if rng.random() < 0.5 else (f"{a + b} - {b}", a)
    return f"Question: What is {exercise}?\nAnswer: {exercise} = {result}."


def document(grammar: Grammar, rng: random.Random) -> str:
    """A story (84 in 100), a few facts or a few sums; paragraphs are separated by one newline."""
    kind = rng.random()
    if kind < 0.08:
        return sums(rng)
    text = Telling(grammar, rng).expand("{facts}" if kind < 0.16 else "{story}")
    return PARAGRAPH.sub("\n", text).strip()


def documents(seed: int, split: str, count: int) -> Iterator[str]:
    """`count` documents; each depends on (seed, split, index) alone: a longer corpus begins with a shorter one."""
    grammar = parse(GRAMMAR)
    return (document(grammar, random.Random(f"{seed}/{split}/{index}")) for index in range(count))
