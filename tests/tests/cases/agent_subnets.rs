use e2e::harness::Case;
pub(crate) const CASES: &[Case] = &[];
