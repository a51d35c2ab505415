//! Does RDMA between two pods or nodes work, and as fast as the hardware should?
//!
//! A ladder: each rung needs the ones below it. The usual tools do the work ([`place`]: where they
//! run), their tables are read ([`perftest`], [`nccl`]), and judged ([`judge`], [`causes`]). What
//! an end has is read from its own `/sys` ([`ends`]), so that nothing has to be told twice.

pub mod causes;
pub mod ends;
pub mod judge;
pub mod ladder;
pub mod nccl;
pub mod perftest;
pub mod ping;
pub mod place;
