-- Which single waits took longest, and who released them? Click an id to jump there. Needs tk_wait.sql.
-- Those that a signal of another rank ended come first, then those that one of their own rank did: they have a cause.

create or replace perfetto view tk_longest_waits as
with named as (
  select *, trim(side || ' rank ' || rank) || ' block ' as own from tk_wait
)
select id, rank, phase, peer, dur, late, drain, rest, released_by, row, ts, track_id, side
from named
order by coalesce(substr(released_by, 1, length(own)) != own, 0) desc, released_by is null, dur desc, id
limit 100;

select *, id as slice_id from tk_longest_waits;
