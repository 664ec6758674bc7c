-- Who makes the others wait? How long others waited until each rank was there. Needs tk_wait.sql.
-- Same numbers as tracekern.analysis.doubt.blame_ranks at the time stamps as they are; that one also says how far the
-- clocks can be trusted.

create or replace perfetto view tk_late_ranks as
select peer as rank, count(*) as waits, sum(late) as late_ns, max(late) as longest_ns, side
from tk_wait
where peer != rank and late > 0
group by side, peer
order by late_ns desc;

select * from tk_late_ranks;
