-- How long does each kernel take on each rank, and how much later than the first rank does it start? Needs tk_wait.sql.

create or replace perfetto view tk_kernels as
select
  s.id, s.ts, s.dur, s.track_id, s.name as kernel, t.rank, extract_arg(s.arg_set_id, 'debug.sequence') as iteration,
  s.ts - min(s.ts) over (partition by t.side, s.name, extract_arg(s.arg_set_id, 'debug.sequence')) as later_ns, t.side
from slice s join tk_track t using (track_id)
where s.category = 'launch'
order by later_ns desc;

select * from tk_kernels;
