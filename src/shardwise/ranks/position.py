"""Until the rest is renamed."""

from shardwise.ranks.activity import Wait as Wait
