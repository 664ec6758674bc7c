-- How many warps of a rank stall at worst, and how many on average over the trace? From the counter tracks.
-- Needs tk_wait.sql.

create or replace perfetto view tk_stalled_warps as
with steps as (
  select t.side, t.rank, c.value, c.ts, lead(c.ts, 1, trace_end()) over (partition by c.track_id order by c.ts) - c.ts as dur
  from counter c join track n on n.id = c.track_id join tk_track t on t.track_id = c.track_id
  where n.name glob 'stalled warps*'
)
select rank, cast(max(value) as int) as most, sum(value * dur) / (trace_end() - trace_start()) as mean, min(ts) as first_ts, side
from steps
group by side, rank
order by mean desc;

select * from tk_stalled_warps;
