-- Which rank waits most, and in which phase? Needs tk_wait.sql. Same numbers as tracekern.analysis.waits.statistics.

create or replace perfetto view tk_wait_by_rank as
select rank, phase, count(*) as waits, sum(dur) as wait_ns, max(dur) as longest_ns, sum(late) as late_ns, sum(drain) as drain_ns, side
from tk_wait
group by side, rank, phase
order by wait_ns desc;

select * from tk_wait_by_rank;
