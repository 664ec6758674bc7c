-- Which single waits took longest, and who released them? Click an id to jump there. Needs tk_wait.sql.
-- Those that a signal of another rank ended come first, those of start-up (launches before the first iteration) last.
-- All parts are read in the order of `dur`, as far as needed.

create or replace perfetto view tk_longest_waits as
with from_afar as (
  select * from tk_wait where start_up is null and released_by not glob trim(side || ' rank ' || rank) || ' block *' order by dur desc, id limit 100
),
longest as (
  select * from tk_wait where start_up is null order by dur desc, id limit 100
),
at_start as (
  select * from tk_wait where (select count(*) from longest) < 100 and start_up = 1 order by dur desc, id limit 100
),
either as (
  select 0 as place, * from from_afar
  union all
  select 1 as place, * from longest where id not in (select id from from_afar)
  union all
  select 2 as place, * from at_start
)
select id, rank, phase, peer, dur, late, drain, rest, released_by, row, ts, track_id, side, start_up
from either
order by place, dur desc, id
limit 100;

select *, id as slice_id from tk_longest_waits;
