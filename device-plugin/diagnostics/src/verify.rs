//! Does RDMA between two pods or nodes work, and as fast as the hardware should?
//!
//! A ladder: each rung needs the ones below it. The usual tools do the work (`place`: where they
//! run); `ping`, `perftest` and `nccl` read their output, `judge` and `causes` judge it. What an end
//! has is read from its own `/sys` (`ends`). `table` judges output that was kept in a file.

mod causes;
mod ends;
mod judge;
mod ladder;
mod nccl;
mod perftest;
mod ping;
mod place;
mod table;

pub use ladder::{CHOICE, Climbed, Measurement, Plan, Rung, climb};
pub use place::Place;
pub use table::{Expected, judge_table};
