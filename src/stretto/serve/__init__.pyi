from stretto.blocks.ctc_decoding import CtcBeamDecoder as CtcBeamDecoder
from stretto.blocks.ctc_decoding import CtcGreedyDecoder as CtcGreedyDecoder
from stretto.blocks.ctc_decoding import CtcHypothesis as CtcHypothesis
from stretto.blocks.ctc_decoding import ctc_beam_search as ctc_beam_search
from stretto.blocks.ctc_decoding import ctc_greedy as ctc_greedy
from stretto.serve.array_prediction import predict_arrays as predict_arrays
from stretto.serve.ctc_sessions import CtcSessions as CtcSessions
from stretto.serve.forecasting import SeriesForecast as SeriesForecast
from stretto.serve.forecasting import forecast as forecast
from stretto.serve.generation import Sampling as Sampling
from stretto.serve.generation import generate as generate
from stretto.serve.generation import generate_tokens as generate_tokens
from stretto.serve.prediction import predict as predict
from stretto.serve.prediction import write_predictions as write_predictions
from stretto.serve.sessions import Sessions as Sessions

__all__: list[str]
