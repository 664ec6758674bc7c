-- Which single waits took longest, and who released them? Click an id to jump there. Needs tk_wait.sql.

create or replace perfetto view tk_longest_waits as
select id, rank, phase, peer, dur, late, drain, rest, released_by, row, ts, track_id, side
from tk_wait
order by dur desc, id
limit 100;

select *, id as slice_id from tk_longest_waits;
