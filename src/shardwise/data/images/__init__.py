"""Pictures: CIFAR's binary files, folders, a synthetic set with planted classes; cropped, mirrored and normalised."""

from shardwise.data.images.build import ImageCorpus, build_images, classes_of
from shardwise.data.images.cifar import CifarFiles
from shardwise.data.images.folders import PictureFolders
from shardwise.data.images.form import ImageBatch, ImageSamples, LabelsOnly
from shardwise.data.images.pictures import Pictures
from shardwise.data.images.policy import ImagePolicy, SyntheticImagePolicy
from shardwise.data.images.synthetic import SyntheticImages

__all__ = [
    "CifarFiles",
    "ImageBatch",
    "ImageCorpus",
    "ImagePolicy",
    "ImageSamples",
    "LabelsOnly",
    "PictureFolders",
    "Pictures",
    "SyntheticImagePolicy",
    "SyntheticImages",
    "build_images",
    "classes_of",
]
