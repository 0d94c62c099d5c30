"""A campaign's draws say how many ranks they want."""

import pytest
from harness import World

from campaign.campaign import Worlds


@pytest.fixture
def worlds(world1: World, world2: World, world3: World, world4: World) -> Worlds:
    return {1: world1, 2: world2, 3: world3, 4: world4}
