//! A plan that streams what does not fit. The weights go by once for a piece of the text, whatever its length, so one
//! program reads pieces of prompts and single tokens.

use super::{Engine, Run};
use crate::TrainError;
use crate::feed::foreign;
use half::bf16;
use storm_device::{PlanDevice, bytes_of};
use storm_exec::{Feed, Planned};
use storm_graph::{DType, Tensor};

pub(super) struct StreamedEngine<D> {
    planned: Planned<D>,
    /// T: tokens of a piece.
    tokens: usize,
    dtype: DType,
    /// The row of logits (V) that was wanted last, as it is stored.
    row: Vec<u8>,
}

impl<D: PlanDevice> StreamedEngine<D> {
    pub(super) fn new(
        planned: Planned<D>,
        vocabulary: usize,
        tokens: usize,
        dtype: DType,
    ) -> Result<StreamedEngine<D>, TrainError> {
        let plan = planned.plan();
        for name in ["piece.tokens", "piece.positions"] {
            let is_wanted =
                |tensor: &Tensor| tensor.name == name && tensor.shape.elements() == tokens;
            if !plan.inputs.iter().any(|input| is_wanted(&input.tensor)) {
                return Err(foreign(format!("it has no input `{name}` of {tokens} tokens")));
            }
        }
        let row = vec![0; vocabulary * dtype.size_bytes()];
        let is_logits =
            |tensor: &Tensor| tensor.name == "logits" && tensor.size_bytes() == tokens * row.len();
        if !plan.results.iter().any(|result| is_logits(&result.tensor)) {
            return Err(foreign(format!("it has no logits of {tokens} tokens")));
        }
        Ok(StreamedEngine { planned, tokens, dtype, row })
    }
}

impl<D: PlanDevice> Engine for StreamedEngine<D> {
    fn tokens(&self, _: Run) -> usize {
        self.tokens
    }

    fn run(
        &mut self,
        _: Run,
        ids: &[i32],
        positions: &[i32],
        last: usize,
    ) -> Result<(), TrainError> {
        self.planned.step(&mut PieceFeed { ids, positions, last, row: &mut self.row })
    }

    fn logits(&mut self, logits: &mut [f32]) -> Result<(), TrainError> {
        match self.dtype {
            DType::BF16 => {
                for (logit, bytes) in logits.iter_mut().zip(self.row.chunks_exact(2)) {
                    *logit = bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32();
                }
            }
            _ => {
                for (logit, bytes) in logits.iter_mut().zip(self.row.chunks_exact(4)) {
                    *logit = f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                }
            }
        }
        Ok(())
    }

    fn node_seconds(&mut self, _: usize) -> Result<Vec<(String, f64)>, TrainError> {
        Ok(Vec::new())
    }
}

/// One piece of a text.
struct PieceFeed<'a> {
    ids: &'a [i32],
    positions: &'a [i32],
    /// Whose logits are wanted.
    last: usize,
    row: &'a mut [u8],
}

impl Feed for PieceFeed<'_> {
    type Error = TrainError;

    fn input(&mut self, _: usize, tensor: &Tensor, _: Option<usize>) -> Result<&[u8], TrainError> {
        match tensor.name.as_str() {
            "piece.tokens" => Ok(bytes_of(self.ids)),
            "piece.positions" => Ok(bytes_of(self.positions)),
            name => Err(foreign(format!("it has an input `{name}`, which no text has"))),
        }
    }

    fn result(&mut self, _: usize, _: &Tensor, _: Option<usize>, bytes: &[u8]) {
        let start = self.last * self.row.len();
        self.row.copy_from_slice(&bytes[start..start + self.row.len()]);
    }
}
