//! Dispatches an instruction to its kernel: one arm per op, with dtypes resolved.

use super::instruction::Instruction;
use super::kernels::attention::{Attention, AttentionShape};
use super::kernels::batch_norm::{self, BatchNormGradOutput, Channels, StatisticsOutput};
use super::kernels::column_sum::column_sum;
use super::kernels::convolution::Columns;
use super::kernels::dropout::{self, Mask as DropoutMask};
use super::kernels::element::{E4m3, Element};
use super::kernels::gemm::{Accumulate, Bf16Products, Bias, Epilogue, Matrix, MatrixMut, gemm};
use super::kernels::group_norm::{
    self, GroupNormGradInput, GroupNormGradOutput, GroupNormOutput, Groups,
};
use super::kernels::heads::{self, Angles, HeadWeights};
use super::kernels::loss::{self, HeadInput, RowOutput};
use super::kernels::norm::{self, NormGradInput, NormInput, NormOutput};
use super::kernels::optimizer::{self, AdamWTensors, RandomBits, SgdTensors, Storage};
use super::kernels::{elementwise, embedding, fp8, gated_coded, layout, quantized, sum};
use super::memory::Frame;
use crate::Scalar;
use crate::placed::{PlacedNode, View};
use half::bf16;
use storm_graph::random::{DropoutWords, PhaseWords, Seed, Stream};
use storm_graph::{
    Accuracy, ActivationCodec, BlockPlace, DType, HeadLayout, Mask, MomentFormat, NormKind, Op,
    ParameterGradients, Planes, QuantizedFormat, QuantizedRow, RotaryDirection, Shape, StepScalars,
    UnitOutput, Window,
};

/// Runs `$body` with `$ty` standing for the storage type of a float dtype.
macro_rules! with_float {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::BF16 => {
                type $ty = bf16;
                $body
            }
            other => unreachable!("shape rules admit no {other} here"),
        }
    };
}

/// Runs `$body` with `$ty` standing for any storage type.
macro_rules! with_any {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::BF16 => {
                type $ty = bf16;
                $body
            }
            DType::I32 => {
                type $ty = i32;
                $body
            }
            DType::I8 => {
                type $ty = i8;
                $body
            }
            DType::U8 => {
                type $ty = u8;
                $body
            }
        }
    };
}

mod images;
mod recurrent;

pub(super) fn execute(instruction: &Instruction, frame: &Frame<'_>) {
    let PlacedNode { op, outputs, layer, .. } = &instruction.placed;
    let products = instruction.products;
    let access = Access { frame };
    match op {
        Op::Embedding { ids, table } => with_float!(table.dtype, E => {
            let width = table.shape.width();
            let (ids, table) = (access.get(ids), access.get::<E>(table));
            embedding::embedding(ids, table, width, access.out(&outputs[0]));
        }),
        Op::EmbeddingGrad { dy, ids, order, accumulator, dtype, .. } => {
            with_float!(dy.dtype, E => with_float!(*dtype, G => {
                let width = dy.shape.width();
                let out = access.out::<G>(&outputs[0]);
                let (dy, ids, order) = (access.get::<E>(dy), access.get(ids), access.get(order));
                embedding::embedding_grad(dy, ids, order, width, mode(accumulator), out);
            }))
        }
        Op::Linear { x, weight, bias, addend } => with_float!(x.dtype, E => {
            let out = access.out::<E>(&outputs[0]);
            let bias = access.maybe::<E>(bias).map(Bias::from);
            let addend = access.maybe::<E>(addend);
            let weight = access.matrix::<E>(weight).transposed();
            linear(products, access.matrix(x), weight, bias, addend, out);
        }),
        Op::LinearInputGrad { dy, weight, addend } => with_float!(dy.dtype, E => {
            let out = access.out::<E>(&outputs[0]);
            let addend = access.maybe::<E>(addend);
            linear(products, access.matrix(dy), access.matrix(weight), None, addend, out);
        }),
        Op::LinearWeightGrad { dy, x, accumulator, dtype } => {
            with_float!(dy.dtype, E => with_float!(*dtype, G => {
                let out = access.out::<G>(&outputs[0]);
                let (dy, x) = (access.matrix(dy), access.matrix(x));
                weight_grad::<E, G>(products, dy, x, mode(accumulator), out);
            }))
        }
        Op::ToFp8 { x, form } => {
            let mut codes = outputs.iter().map(|output| access.out::<u8>(output));
            let rows = if form.has_rows() { codes.next() } else { None };
            let columns = if form.has_columns() { codes.next() } else { None };
            fp8::to_fp8(access.get(x), x.shape.width(), rows, columns);
        }
        Op::Fp8Linear { x, weight, bias, addend, output } => {
            let (x, x_scale) = access.codes(x);
            let (weight, weight_scale) = access.codes(weight);
            let (rows, cols) = (output.rows(), output.width());
            let addend = access.maybe::<bf16>(addend);
            let epilogue = Epilogue {
                scale: x_scale * weight_scale,
                bias: access.maybe::<bf16>(bias).map(Bias::from),
                addend: addend.map(|addend| Matrix::row_major(addend, rows, cols)),
                accumulate: Accumulate::Replace,
            };
            let out = MatrixMut::row_major(access.out::<bf16>(&outputs[0]), rows, cols);
            gemm(x, weight.transposed(), out, epilogue);
        }
        Op::Fp8WeightGrad { dy, x, accumulator, dtype } => with_float!(*dtype, G => {
            let (dy, dy_scale) = access.codes(dy);
            let (x, x_scale) = access.codes(x);
            let out = MatrixMut::row_major(access.out::<G>(&outputs[0]), dy.rows(), x.rows());
            let accumulate = mode(accumulator);
            let epilogue =
                Epilogue { scale: dy_scale * x_scale, accumulate, ..Epilogue::default() };
            gemm(dy, x.transposed(), out, epilogue);
        }),
        Op::ColumnSum { x, accumulator, dtype } => {
            with_float!(x.dtype, E => with_float!(*dtype, G => {
                let partials = access.out::<f32>(&outputs[1]);
                let out = access.out::<G>(&outputs[0]);
                let width = x.shape.width();
                column_sum(access.get::<E>(x), width, partials, mode(accumulator), out);
            }))
        }
        Op::Conv2d { .. }
        | Op::Conv2dInputGrad { .. }
        | Op::Conv2dWeightGrad { .. }
        | Op::MaxPool { .. }
        | Op::MaxPoolGrad { .. }
        | Op::AveragePool { .. }
        | Op::AveragePoolGrad { .. }
        | Op::Augment { .. } => images::execute(op, outputs, products, &access),
        Op::Add { a, b } => with_float!(a.dtype, E => {
            elementwise::add::<E>(access.get(a), access.get(b), access.out(&outputs[0]));
        }),
        Op::Accumulate { x, sum } => with_float!(x.dtype, E => with_float!(sum.dtype, S => {
            elementwise::accumulate::<E, S>(access.get(x), access.out(&outputs[0]));
        })),
        Op::MovingAverage { x, momentum, .. } => {
            elementwise::moving_average(access.get(x), *momentum, access.out(&outputs[0]));
        }
        Op::Mul { a, b } => with_float!(a.dtype, E => {
            elementwise::mul::<E>(access.get(a), access.get(b), access.out(&outputs[0]));
        }),
        Op::Scale { x, factor } => with_float!(x.dtype, E => {
            elementwise::scale::<E>(access.get(x), *factor, access.out(&outputs[0]));
        }),
        Op::Dropout { x, random, addend, rate, stream } => with_float!(x.dtype, E => {
            let words = DropoutWords::from_words(access.get(random).try_into().expect("its shape"));
            let stream = Stream { tensor: *stream, layer: *layer };
            let mask = DropoutMask { words, stream, rate: *rate };
            let (x, addend) = (access.get::<E>(x), access.maybe::<E>(addend));
            dropout::dropout(mask, x, addend, access.out(&outputs[0]));
        }),
        Op::Activation { x, function } => with_float!(x.dtype, E => {
            elementwise::activation::<E>(*function, access.get(x), access.out(&outputs[0]));
        }),
        Op::ActivationGrad { dy, x, function } => with_float!(x.dtype, E => {
            elementwise::activation_grad::<E>(*function, access.get(dy), access.out(&outputs[0]));
        }),
        Op::SwiGlu { gate_up, function } => with_float!(gate_up.dtype, E => {
            let width = gate_up.shape.width() / 2;
            elementwise::gated::<E>(*function, width, access.get(gate_up), access.out(&outputs[0]));
        }),
        Op::SwiGluGrad { dy, function, codec, .. } => with_float!(dy.dtype, E => {
            let (width, gate_up) = (dy.shape.width(), access.out(&outputs[0]));
            match codec {
                ActivationCodec::None => {
                    elementwise::gated_grad::<E>(*function, width, access.get(dy), gate_up);
                }
                ActivationCodec::Int8 => {
                    gated_coded::rounded_grad::<E>(*function, width, access.get(dy), gate_up);
                }
            }
        }),
        Op::SwiGluGradAndOutput { dy, function, codec, .. } => with_float!(dy.dtype, E => {
            let (gate_up, dy_then_output) = (access.out(&outputs[0]), access.out(&outputs[1]));
            let make = match codec {
                ActivationCodec::None => elementwise::gated_grad_and_output::<E>,
                ActivationCodec::Int8 => gated_coded::rounded_grad_and_output::<E>,
            };
            make(*function, dy.shape.width(), dy_then_output, gate_up);
        }),
        Op::SwiGluCoded { gate_up, function } => with_float!(gate_up.dtype, E => {
            let width = gate_up.shape.width() / 2;
            let gate_up = access.get::<E>(gate_up);
            elementwise::gated::<E>(*function, width, gate_up, access.out(&outputs[0]));
            // A row of codes has the codes of the gates, then those of the ups.
            let form = QuantizedRow::new(QuantizedFormat::Int8, width);
            quantized::quantize::<E>(form, gate_up, access.out(&outputs[1]));
        }),
        Op::SwiGluCodedGrad { dy, code, function, output } => with_float!(dy.dtype, E => {
            let (width, code) = (dy.shape.width(), access.get(code));
            let gradient = access.out(&outputs[0]);
            match output {
                UnitOutput::Skip => {
                    gated_coded::coded_grad::<E>(*function, width, access.get(dy), code, gradient);
                }
                UnitOutput::Compute => gated_coded::coded_grad_and_output::<E>(
                    *function,
                    width,
                    access.out(&outputs[1]),
                    code,
                    gradient,
                ),
            }
        }),
        Op::Norm { x, delta, weight, bias, kind, epsilon } => with_float!(x.dtype, E => {
            let has_mean = *kind == NormKind::Layer;
            let sum = if has_mean { 3 } else { 2 };
            norm::norm(
                NormInput::<E> {
                    x: access.get(x),
                    delta: access.maybe(delta),
                    weight: access.get(weight),
                    bias: access.maybe(bias),
                    kind: *kind,
                    epsilon: *epsilon,
                },
                NormOutput {
                    y: access.out(&outputs[0]),
                    rstd: access.out(&outputs[1]),
                    mean: has_mean.then(|| access.out(&outputs[2])),
                    sum: delta.is_some().then(|| access.out(&outputs[sum])),
                },
            );
        }),
        Op::NormGrad {
            dy,
            x,
            weight,
            bias,
            rstd,
            mean,
            addend,
            weight_accumulator,
            bias_accumulator,
            kind,
            parameters,
            dtype,
        } => with_float!(x.dtype, E => {
            let input = NormGradInput::<E> {
                dy: access.get(dy),
                x: access.get(x),
                weight: access.get(weight),
                rstd: access.get(rstd),
                mean: access.maybe(mean),
                addend: access.maybe(addend),
                kind: *kind,
            };
            with_float!(*dtype, G => {
                let grads = (*parameters == ParameterGradients::Compute).then(|| {
                    norm::NormParameterGrads::<G> {
                        partials: access.out(&outputs[outputs.len() - 1]),
                        d_weight: (access.out(&outputs[1]), mode(weight_accumulator)),
                        d_bias: bias
                            .is_some()
                            .then(|| (access.out(&outputs[2]), mode(bias_accumulator))),
                    }
                });
                norm::norm_grad(input, access.out(&outputs[0]), grads);
            })
        }),
        Op::QkNorm { qkv, query_weight, key_weight, table, heads, epsilon } => {
            with_float!(qkv.dtype, E => {
                let query = access.get::<E>(query_weight);
                let weights = HeadWeights { query, key: access.get(key_weight) };
                let angles = table.as_ref().map(|table| access.angles(table, RotaryDirection::Forward));
                let (y, rstd) = (access.out(&outputs[0]), access.out(&outputs[1]));
                heads::qk_norm(*heads, access.get(qkv), weights, angles, *epsilon, y, rstd);
            })
        }
        Op::QkNormGrad {
            dy,
            qkv,
            query_weight,
            key_weight,
            table,
            rstd,
            query_accumulator,
            key_accumulator,
            heads,
            parameters,
            dtype,
        } => with_float!(qkv.dtype, E => {
            let (dy, qkv, rstd) = (access.get::<E>(dy), access.get(qkv), access.get(rstd));
            let query = access.get::<E>(query_weight);
            let weights = HeadWeights { query, key: access.get(key_weight) };
            let angles = table.as_ref().map(|table| access.angles(table, RotaryDirection::Inverse));
            // First the gradient of the normalized heads, then that of the input.
            let d: &mut [E] = access.out(&outputs[0]);
            heads::rotary(*heads, angles, dy, d);
            if *parameters == ParameterGradients::Compute {
                with_float!(*dtype, G => heads::qk_norm_weight_grads::<E, G>(
                    *heads,
                    d,
                    qkv,
                    rstd,
                    access.out(&outputs[3]),
                    (access.out(&outputs[1]), mode(query_accumulator)),
                    (access.out(&outputs[2]), mode(key_accumulator)),
                ));
            }
            heads::qk_norm_grad(*heads, qkv, weights, rstd, d);
        }),
        Op::BatchStatistics { x, running_mean, running_variance, phase } => {
            let out = StatisticsOutput {
                mean: access.out(&outputs[0]),
                variance: access.out(&outputs[1]),
                unbiased: access.out(&outputs[2]),
            };
            if access.phase(phase).training {
                let partials = access.out(&outputs[3]);
                with_float!(x.dtype, E => {
                    batch_norm::batch_statistics::<E>(access.get(x), partials, out);
                });
            } else {
                out.mean.copy_from_slice(access.get(running_mean));
                out.variance.copy_from_slice(access.get(running_variance));
                out.unbiased.copy_from_slice(access.get(running_variance));
            }
        }
        Op::BatchNorm { x, mean, variance, weight, bias, addend, epsilon, activation } => {
            with_float!(x.dtype, E => with_float!(weight.dtype, W => {
                let channels = Channels::<W> {
                    mean: access.get(mean),
                    variance: access.get(variance),
                    weight: access.get(weight),
                    bias: access.get(bias),
                    epsilon: *epsilon,
                    activation: *activation,
                };
                let (x, addend) = (access.get::<E>(x), access.maybe(addend));
                batch_norm::batch_norm(channels, x, addend, access.out(&outputs[0]));
            }))
        }
        Op::BatchNormGrad {
            dy,
            x,
            addend,
            mean,
            variance,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            epsilon,
            activation,
            parameters,
            dtype,
        } => with_float!(x.dtype, E => with_float!(weight.dtype, W => with_float!(*dtype, G => {
            let channels = Channels::<W> {
                mean: access.get(mean),
                variance: access.get(variance),
                weight: access.get(weight),
                bias: access.get(bias),
                epsilon: *epsilon,
                activation: *activation,
            };
            let compute = *parameters == ParameterGradients::Compute;
            let partials = if compute { 3 } else { 1 };
            let output = BatchNormGradOutput::<E, G> {
                x: access.out(&outputs[0]),
                parameters: compute.then(|| [
                    (access.out(&outputs[1]), mode(weight_accumulator)),
                    (access.out(&outputs[2]), mode(bias_accumulator)),
                ]),
                partials: access.out(&outputs[partials]),
                d_addend: addend.is_some().then(|| access.out(&outputs[partials + 1])),
            };
            batch_norm::batch_norm_grad(channels, access.get(dy), access.maybe(addend), output);
        }))),
        Op::GroupNorm { x, weight, bias, addend, groups, epsilon, activation } => {
            with_float!(x.dtype, E => with_float!(weight.dtype, W => {
                let groups = Groups::<W> {
                    count: *groups,
                    weight: access.get(weight),
                    bias: access.get(bias),
                    activation: *activation,
                };
                let output = GroupNormOutput::<E> {
                    y: access.out(&outputs[0]),
                    mean: access.out(&outputs[1]),
                    rstd: access.out(&outputs[2]),
                    partials: access.out(&outputs[3]),
                };
                let (x, addend) = (access.get(x), access.maybe(addend));
                group_norm::group_norm(groups, *epsilon, x, addend, output);
            }))
        }
        Op::GroupNormGrad {
            dy,
            x,
            addend,
            mean,
            rstd,
            weight,
            bias,
            weight_accumulator,
            bias_accumulator,
            groups,
            activation,
            parameters,
            dtype,
        } => with_float!(x.dtype, E => with_float!(weight.dtype, W => with_float!(*dtype, G => {
            let groups = Groups::<W> {
                count: *groups,
                weight: access.get(weight),
                bias: access.get(bias),
                activation: *activation,
            };
            let input = GroupNormGradInput::<E> {
                dy: access.get(dy),
                x: access.get(x),
                addend: access.maybe(addend),
                mean: access.get(mean),
                rstd: access.get(rstd),
            };
            let compute = *parameters == ParameterGradients::Compute;
            let partials = if compute { 3 } else { 1 };
            let output = GroupNormGradOutput::<E, G> {
                dx: access.out(&outputs[0]),
                parameters: compute.then(|| [
                    (access.out(&outputs[1]), mode(weight_accumulator)),
                    (access.out(&outputs[2]), mode(bias_accumulator)),
                ]),
                partials: access.out(&outputs[partials]),
                d_addend: addend.is_some().then(|| access.out(&outputs[partials + 1])),
            };
            group_norm::group_norm_grad(groups, input, output);
        }))),
        Op::RotaryTable { positions, frequencies } => {
            let (positions, table) = (access.get(positions), access.out(&outputs[0]));
            heads::rotary_table(frequencies, positions, table);
        }
        Op::Rotary { qkv, table, heads, direction } => with_float!(qkv.dtype, E => {
            let angles = Some(access.angles(table, *direction));
            heads::rotary(*heads, angles, access.get::<E>(qkv), access.out(&outputs[0]));
        }),
        Op::Attention { qkv, segments, heads, mask, scale } => with_float!(qkv.dtype, E => {
            let (y, log_sum_exp) = (access.out::<E>(&outputs[0]), access.out(&outputs[1]));
            access
                .attention(qkv, segments, heads, *mask, *scale, products)
                .forward(access.get(qkv), y, log_sum_exp);
        }),
        Op::AttentionGrad { dy, qkv, y, log_sum_exp, segments, heads, mask, scale } => {
            with_float!(qkv.dtype, E => {
                access.attention(qkv, segments, heads, *mask, *scale, products).backward::<E>(
                    access.get(dy),
                    access.get(qkv),
                    access.get(y),
                    access.get(log_sum_exp),
                    access.out(&outputs[1]),
                    access.out(&outputs[0]),
                );
            })
        }
        Op::CachedAttention { qkv, positions, heads, mask, scale, .. } => {
            with_float!(qkv.dtype, E => {
                let attention = access.attention(qkv, &None, heads, *mask, *scale, products);
                let (y, cache) = (access.out::<E>(&outputs[0]), access.out(&outputs[1]));
                attention.cached(access.get(qkv), access.get(positions), cache, y);
            })
        }
        Op::Tanh { .. }
        | Op::TanhGrad { .. }
        | Op::GruReset { .. }
        | Op::GruResetGrad { .. }
        | Op::GruState { .. }
        | Op::GruStateGrad { .. }
        | Op::Categorical { .. }
        | Op::CategoricalGrad { .. }
        | Op::SampleClass { .. }
        | Op::Divergence { .. }
        | Op::DivergenceGrad { .. }
        | Op::SquaredError { .. }
        | Op::SquaredErrorGrad { .. }
        | Op::OutcomeLoss { .. }
        | Op::OutcomeLossGrad { .. } => recurrent::execute(op, outputs, *layer, &access),
        Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing,
            accuracy,
        } => with_float!(hidden.dtype, E => {
            let how = (*chunk_rows, *label_smoothing);
            let input = access.head::<E>(hidden, weight, targets, denominator, how, products);
            let (logits, rows) = (outputs.len() - 1, access.row_output(*accuracy, outputs, 1));
            loss::head_loss(input, access.out(&outputs[logits]), rows);
        }),
        Op::HeadLossGrad {
            hidden,
            weight,
            targets,
            denominator,
            d_row_loss,
            accumulator,
            chunk_rows,
            label_smoothing,
            accuracy,
            weight_gradient,
            dtype,
        } => with_float!(hidden.dtype, E => with_float!(*dtype, G => {
            let compute = *weight_gradient == ParameterGradients::Compute;
            let how = (*chunk_rows, *label_smoothing);
            loss::head_loss_grad::<E, G>(
                access.head(hidden, weight, targets, denominator, how, products),
                access.get(d_row_loss),
                access.out(&outputs[2]),
                access.row_output(*accuracy, outputs, outputs.len() - 1),
                access.out(&outputs[1]),
                compute.then(|| (access.out(&outputs[3]), mode(accumulator))),
            );
        })),
        Op::Sum { x } => with_float!(x.dtype, E => {
            let partials = access.out(&outputs[1]);
            access.out(&outputs[0])[0] = sum::sum::<E>(access.get(x), partials);
        }),
        Op::SumOfSquares { x } => with_float!(x.dtype, E => {
            let partials = access.out(&outputs[1]);
            access.out(&outputs[0])[0] = sum::sum_of_squares::<E>(access.get(x), partials);
        }),
        Op::SumOfPartials { partials } => {
            access.out(&outputs[0])[0] = sum::sum_of_partials(access.get(partials));
        }
        Op::GlobalNorm { parts } => {
            let parts = parts.iter().map(|part| access.get::<f32>(part)[0]);
            access.out(&outputs[0])[0] = sum::global_norm(parts);
        }
        Op::ClipScale { norm, max_norm } => {
            access.out(&outputs[0])[0] = sum::clip_scale(access.get::<f32>(norm)[0], *max_norm);
        }
        Op::Broadcast { x, dtype, .. } => with_float!(*dtype, E => {
            layout::fill::<E>(access.get::<f32>(x)[0], access.out(&outputs[0]));
        }),
        Op::Fill { dtype, value, .. } => with_float!(*dtype, E => {
            layout::fill::<E>(*value, access.out(&outputs[0]));
        }),
        Op::Reshape { x, .. } => with_any!(x.dtype, T => {
            layout::copy::<T>(access.get(x), access.out(&outputs[0]));
        }),
        Op::Transpose { x, axes } => with_any!(x.dtype, T => {
            let out = access.out::<T>(&outputs[0]);
            layout::transpose(access.get(x), x.shape.axes(), axes, out);
        }),
        Op::Convert { x, dtype } => with_float!(x.dtype, A => with_float!(*dtype, B => {
            layout::convert::<A, B>(access.get(x), access.out(&outputs[0]));
        })),
        Op::Quantize { x, format } => with_float!(x.dtype, E => {
            let form = QuantizedRow::new(*format, x.shape.width());
            quantized::quantize(form, access.get::<E>(x), access.out(&outputs[0]));
        }),
        Op::Dequantize { rows, form, dtype } => with_float!(*dtype, E => {
            quantized::dequantize(*form, access.get(rows), access.out::<E>(&outputs[0]));
        }),
        Op::BlockMatrix { parts, places, shape, dtype } => {
            with_float!(parts[0].dtype, A => with_float!(*dtype, B => {
                let (width, out) = (shape.width(), access.out::<B>(&outputs[0]));
                let mut first = 0;
                for (index, (part, place)) in parts.iter().zip(places).enumerate() {
                    // Elements that no part covers are zeroed with the part above them, or with
                    // the first part.
                    let end = places.get(index + 1).map_or(shape.rows(), |next| next.row);
                    let band = &mut out[first * width..end * width];
                    let place = BlockPlace { row: place.row - first, ..*place };
                    layout::place_block::<A, B>(access.get(part), part.shape.width(), place, width, band);
                    first = end;
                }
            }))
        }
        Op::BlockGrad { dy, accumulator, place, shape, dtype } => {
            with_float!(dy.dtype, A => with_float!(*dtype, B => {
                let out = access.out::<B>(&outputs[0]);
                let dy = (access.get::<A>(dy), dy.shape.width());
                layout::block_grad(dy, *place, shape.width(), mode(accumulator), out);
            }))
        }
        Op::RandomNormal { random, dtype, deviation, stream, .. } => {
            with_float!(*dtype, E => {
                let stream = Stream { tensor: *stream, layer: *layer };
                let seed = access.seed(random);
                layout::random_normal::<E>(seed, stream, *deviation, access.out(&outputs[0]));
            })
        }
        Op::AdamW {
            parameter,
            gradient,
            first_moment,
            master,
            scalars,
            clip,
            random,
            observed,
            hyper,
            rounding,
            moment_rounding,
            stream,
            first_element,
            ..
        } => {
            if access.clip(clip) == 0.0 || access.scalars(scalars).is_none() {
                return; // a cancelled update
            }
            let storage = Storage {
                parameter: *rounding,
                moments: *moment_rounding,
                random: access.random_bits(random, *stream, *layer, *first_element),
            };
            let (scalars, clip) = (access.scalars(scalars), access.clip(clip));
            with_float!(parameter.dtype, P => with_float!(gradient.dtype, G => {
                match MomentFormat::of(first_moment.dtype) {
                    MomentFormat::Elements(dtype) => with_float!(dtype, M => {
                        let tensors = access.updated::<P, G, M>(gradient, master, observed, outputs);
                        optimizer::adamw(hyper, &scalars, clip, storage, tensors);
                    }),
                    MomentFormat::Int8 => {
                        let bound = hyper.first_moment_bound().expect("checked with the graph");
                        let tensors =
                            access.updated::<P, G, u8>(gradient, master, observed, outputs);
                        let hyper = (hyper, bound);
                        optimizer::adamw_int8(hyper, &scalars, clip, storage, tensors);
                    }
                    MomentFormat::Observed => unreachable!("refused with the graph"),
                }
            }));
        }
        Op::Sgd {
            parameter,
            gradient,
            momentum,
            master,
            scalars,
            clip,
            random,
            hyper,
            rounding,
            moment_rounding,
            stream,
            first_element,
        } => {
            if access.clip(clip) == 0.0 || access.scalars(scalars).is_none() {
                return; // a cancelled update
            }
            let storage = Storage {
                parameter: *rounding,
                moments: *moment_rounding,
                random: access.random_bits(random, *stream, *layer, *first_element),
            };
            let (scalars, clip) = (access.scalars(scalars), access.clip(clip));
            let moments = momentum.as_ref().map_or(DType::F32, |momentum| momentum.dtype);
            let master_output = 1 + usize::from(momentum.is_some());
            with_float!(parameter.dtype, P => with_float!(gradient.dtype, G => with_float!(moments, M => {
                let tensors = SgdTensors::<P, G, M> {
                    parameter: access.out(&outputs[0]),
                    master: master.is_some().then(|| access.out(&outputs[master_output])),
                    gradient: access.get(gradient),
                    momentum: momentum.is_some().then(|| access.out(&outputs[1])),
                };
                optimizer::sgd(hyper, &scalars, clip, storage, tensors);
            })));
        }
    }
}

fn mode(accumulator: &Option<View>) -> Accumulate {
    if accumulator.is_some() { Accumulate::Add } else { Accumulate::Replace }
}

fn linear<E: Element>(
    products: Bf16Products,
    x: Matrix<'_, E>,
    weight: Matrix<'_, E>,
    bias: Option<Bias<'_>>,
    addend: Option<&[E]>,
    out: &mut [E],
) {
    let (rows, cols) = (x.rows(), weight.cols());
    let epilogue = Epilogue {
        scale: 1.0,
        bias,
        addend: addend.map(|addend| Matrix::row_major(addend, rows, cols)),
        accumulate: Accumulate::Replace,
    };
    products.gemm(x, weight, MatrixMut::row_major(out, rows, cols), epilogue);
}

/// `dyᵀ · x`.
fn weight_grad<E: Element, G: Element>(
    products: Bf16Products,
    dy: Matrix<'_, E>,
    x: Matrix<'_, E>,
    accumulate: Accumulate,
    out: &mut [G],
) {
    let out = MatrixMut::row_major(out, dy.cols(), x.cols());
    products.gemm(dy.transposed(), x, out, Epilogue { accumulate, ..Epilogue::default() });
}

fn planes(input: &Shape, window: Window) -> Planes {
    Planes::new(input, window).expect("the shape rule has checked it")
}

/// Typed access to the views of the running instruction. [`execute`] requests each output once,
/// and never an operand that an output overwrites: kernels read such an operand through the output.
struct Access<'f, 'm> {
    frame: &'f Frame<'m>,
}

impl<'m> Access<'_, 'm> {
    fn get<T: Scalar>(&self, view: &View) -> &'m [T] {
        // SAFETY: by the rule above, no output overwrites this operand.
        unsafe { self.frame.operand(view) }
    }

    fn maybe<T: Scalar>(&self, view: &Option<View>) -> Option<&'m [T]> {
        view.as_ref().map(|view| self.get(view))
    }

    #[allow(clippy::mut_from_ref)] // distinct outputs are distinct memory
    fn out<T: Scalar>(&self, view: &View) -> &'m mut [T] {
        // SAFETY: by the rule above, this output is requested only once.
        unsafe { self.frame.output(view) }
    }

    /// The rows of a tensor as a matrix.
    fn matrix<T: Scalar + Element>(&self, view: &View) -> Matrix<'m, T> {
        Matrix::row_major(self.get(view), view.shape.rows(), view.shape.width())
    }

    /// A matrix of 8-bit float codes, and its scale.
    fn codes(&self, view: &View) -> (Matrix<'m, E4m3>, f32) {
        fp8::operand(self.get(view), view.shape.width())
    }

    /// Memory for columns of a convolution.
    fn columns<E: Scalar>(
        &self,
        input: &Shape,
        window: Window,
        memory: &View,
        products: Bf16Products,
    ) -> Columns<'m, E> {
        Columns { planes: planes(input, window), memory: self.out(memory), products }
    }

    fn angles(&self, table: &View, direction: RotaryDirection) -> Angles<'m> {
        Angles { table: self.get(table), pairs: table.shape.axes()[2], direction }
    }

    fn attention(
        &self,
        qkv: &View,
        segments: &Option<View>,
        heads: &HeadLayout,
        mask: Mask,
        scale: f32,
        products: Bf16Products,
    ) -> Attention<'m> {
        let axes = qkv.shape.axes();
        let shape = AttentionShape {
            batch: axes[0],
            seq: axes[1],
            q_heads: heads.query_heads,
            kv_heads: heads.key_value_heads,
            head_dim: heads.head_dim,
        };
        Attention { shape, mask, scale, segments: self.maybe(segments), products }
    }

    fn head<E: Scalar>(
        &self,
        hidden: &View,
        weight: &View,
        targets: &View,
        denominator: &View,
        (chunk_rows, label_smoothing): (usize, f32),
        products: Bf16Products,
    ) -> HeadInput<'m, E> {
        HeadInput {
            hidden: self.get(hidden),
            weight: self.get(weight),
            targets: self.get(targets),
            denominator: self.get::<f32>(denominator)[0],
            width: hidden.shape.width(),
            chunk_rows: chunk_rows.clamp(1, hidden.shape.rows().max(1)),
            label_smoothing,
            products,
        }
    }

    /// The outputs of a loss for each row: the loss is the first output, and whether the prediction
    /// is correct is output number `correct`.
    fn row_output(&self, accuracy: Accuracy, outputs: &[View], correct: usize) -> RowOutput<'m> {
        let correct = (accuracy == Accuracy::Compute).then(|| self.out(&outputs[correct]));
        RowOutput { losses: self.out(&outputs[0]), correct }
    }

    /// The tensors that an AdamW update changes, and the gradient.
    fn updated<P: Scalar, G: Scalar, M: Scalar>(
        &self,
        gradient: &View,
        master: &Option<View>,
        observed: &Option<View>,
        outputs: &[View],
    ) -> AdamWTensors<'m, P, G, M> {
        AdamWTensors {
            parameter: self.out(&outputs[0]),
            master: master.is_some().then(|| self.out(&outputs[3])),
            gradient: self.get(gradient),
            first_moment: self.out(&outputs[1]),
            second_moment: self.out(&outputs[2]),
            observed: observed
                .is_some()
                .then(|| self.out(&outputs[3 + usize::from(master.is_some())])),
        }
    }

    fn scalars(&self, view: &View) -> StepScalars {
        let values = self.get::<f32>(view);
        StepScalars {
            learning_rate: values[0],
            first_correction: values[1],
            second_correction: values[2],
        }
    }

    fn clip(&self, view: &Option<View>) -> f32 {
        self.maybe::<f32>(view).map_or(1.0, |clip| clip[0])
    }

    fn seed(&self, view: &View) -> Seed {
        let words = self.get::<i32>(view);
        Seed::from_words([words[0], words[1], words[2]])
    }

    fn phase(&self, view: &View) -> PhaseWords {
        PhaseWords::from_words(self.get(view).try_into().expect("its shape"))
    }

    fn random_bits(
        &self,
        view: &Option<View>,
        tensor: u16,
        layer: u16,
        first_element: usize,
    ) -> Option<RandomBits> {
        let seed = self.seed(view.as_ref()?);
        Some(RandomBits { seed, stream: Stream { tensor, layer }, first_element })
    }
}
