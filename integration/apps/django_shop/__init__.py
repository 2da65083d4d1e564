"""A Django project with one application, both this package. Its settings are `integration.apps.django_shop.settings`."""
