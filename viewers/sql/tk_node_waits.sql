-- Do ranks wait for their own node or for others? One row a pair: ranks of `node` wait for ranks of `peer_node`.
-- Empty where all ranks are on one node. Needs tk_wait.sql. Same numbers as tracekern.analysis.questions.nodes, but with
-- waits of start-up, and without barriers that a trace has no arrows for. Waits of a rank for its own warps are left out.

create or replace perfetto view tk_node_waits as
with of_rank as (
  select distinct side, rank, node from tk_track where node is not null
),
of_pair as (
  select side, rank, peer, count(*) as waits, sum(dur) as wait_ns, sum(late) as late_ns, sum(drain) as drain_ns
  from tk_wait
  where peer != rank
  group by side, rank, peer
)
select
  w.node, p.node as peer_node,
  sum(waits) as waits, sum(wait_ns) as wait_ns, sum(late_ns) as late_ns, sum(drain_ns) as drain_ns, p.side
from of_pair
join of_rank w using (side, rank)
join of_rank p on p.side = of_pair.side and p.rank = of_pair.peer
group by p.side, w.node, p.node
order by wait_ns desc;

select * from tk_node_waits;
