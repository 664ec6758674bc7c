-- Who waits for whom? One row a pair of ranks: `rank` waits, `peer` is waited for. Needs tk_wait.sql.
-- Same numbers as tracekern.analysis.waits.matrix, but for barriers inside a block, which have no arrows in a trace.

create or replace perfetto view tk_wait_matrix as
select rank, peer, count(*) as waits, sum(dur) as wait_ns, sum(late) as late_ns, sum(drain) as drain_ns, side
from tk_wait
where peer is not null
group by side, rank, peer
order by wait_ns desc;

select * from tk_wait_matrix;
