from collections import Counter

from tests.mutants.table import AREAS, problems, read_mutants


def test_the_table_of_mutants_fits_the_sources():
    mutants = read_mutants()
    assert problems(mutants) == []
    assert len(mutants) >= 40
    by_area = Counter(mutant.area for mutant in mutants)
    assert {area: by_area[area] for area in AREAS if by_area[area] < 4} == {}
    assert [mutant.name for mutant in mutants if not mutant.caught_by] == []
